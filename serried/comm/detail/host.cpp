// The machine's identity from the kernel, and plain sockets that fail quietly.
#include "serried/comm/detail/host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <fstream>
#include <memory>
#include <thread>

namespace serried::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return int(std::clamp<int64_t>(left.count(), 0, INT_MAX));
}

bool connects(const addrinfo& address, Clock::time_point deadline) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  bool ok = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  if (!ok && errno == EINPROGRESS) {
    pollfd waiting{.fd = fd, .events = POLLOUT, .revents = 0};
    int error = 0;
    socklen_t size = sizeof(error);
    ok = ::poll(&waiting, 1, milliseconds_until(deadline)) == 1 &&
         ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
  }
  ::close(fd);
  return ok;
}

bool listens(const std::string& host, uint16_t port, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    if (connects(*address, deadline)) return true;
  }
  return false;
}

int listen_at(const sockaddr* address, socklen_t size) {
  const int fd = ::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  const int off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address->sa_family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (::bind(fd, address, size) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

std::string host_identity() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> pid_namespace{};
  [[maybe_unused]] const ssize_t length =
      ::readlink("/proc/self/ns/pid", pid_namespace.data(), pid_namespace.size() - 1);
  return std::string(name.data()) + " " + boot + " " + pid_namespace.data();
}

bool wait_for_listener(const std::string& host, uint16_t port, milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  milliseconds pause(1);
  while (!listens(host, port, deadline)) {
    if (Clock::now() + pause > deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(100));
  }
  return true;
}

bool is_listening(const std::string& host, uint16_t port, milliseconds timeout) {
  return listens(host, port, Clock::now() + timeout);
}

int listen_on(uint16_t port) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(port);
  const int fd = listen_at(reinterpret_cast<const sockaddr*>(&any6), sizeof(any6));
  if (fd >= 0 || errno == EADDRINUSE || errno == EACCES) return fd;
  sockaddr_in any4{};  // a machine without IPv6
  any4.sin_family = AF_INET;
  any4.sin_port = htons(port);
  return listen_at(reinterpret_cast<const sockaddr*>(&any4), sizeof(any4));
}

uint16_t port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  int listening = 0;
  socklen_t flag_size = sizeof(listening);
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &flag_size) != 0 || listening == 0) return 0;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace serried::detail
