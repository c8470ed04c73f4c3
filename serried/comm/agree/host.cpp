// What the kernel says in /proc, and plain sockets that fail quietly.
#include "serried/comm/agree/host.h"

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

#include <c10/util/StringUtil.h>

namespace serried::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// 'R', 'S', 'T', 'Z' ...; ' ' where there is no such process.
char process_state(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return ' ';
  const size_t name_end = line.rfind(')');  // the name may hold anything
  return name_end == std::string::npos || name_end + 2 >= line.size() ? '?' : line[name_end + 2];
}

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

std::string text_of(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> name{};
  ::getnameinfo(address, size, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST);
  return name.data();
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses addresses_of(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return {found, ::freeaddrinfo};
}

// The first address of `host` that something listens at, "" if there is none.
std::string find_listener(const std::string& host, uint16_t port, Clock::time_point deadline) {
  const Addresses found = addresses_of(host, port);
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    if (connects(*address, deadline)) return text_of(address->ai_addr, address->ai_addrlen);
  }
  return "";
}

std::string source_of_packets_to(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_storage source{};
  socklen_t size = sizeof(source);
  auto* generic = reinterpret_cast<sockaddr*>(&source);
  const bool known = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0 && ::getsockname(fd, generic, &size) == 0;
  ::close(fd);
  return known ? text_of(generic, size) : "";
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

bool process_has_ended(int pid) {
  const char state = process_state(pid);
  return state == ' ' || state == 'Z' || state == 'X';
}

std::string stopped_text(const std::vector<int>& pids) {
  std::string text;
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    const char state = pids[rank] == 0 ? ' ' : process_state(pids[rank]);
    if (state != 'T' && state != 't') continue;
    text += c10::str(text.empty() ? "; " : ", ", "rank ", rank, " (pid ", pids[rank], ") is stopped");
  }
  return text.empty() ? text : text + ": SIGCONT lets it go on";
}

std::string wait_for_listener(const std::string& host, uint16_t port, milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  milliseconds pause(1);
  std::string found;
  while ((found = find_listener(host, port, deadline)).empty()) {
    if (Clock::now() + pause > deadline) return "";
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(100));
  }
  return found;
}

std::string address_towards(const std::string& host) {
  const Addresses found = addresses_of(host, 9);  // a socket of datagrams connects to any port
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    const std::string source = source_of_packets_to(*address);
    if (!source.empty()) return source;
  }
  return "";
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

bool is_listening(const std::string& host, uint16_t port, milliseconds timeout) {
  return !find_listener(host, port, Clock::now() + timeout).empty();
}

}  // namespace serried::detail
