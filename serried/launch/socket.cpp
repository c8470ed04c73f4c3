// Sockets: listening, connecting, noticing dead machines.
#include "serried/launch/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <vector>

#include "serried/base/listen.h"
#include "serried/launch/error.h"

namespace serried::launch {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const char* host, int port, std::string& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (code != 0) error = ::gai_strerror(code);
  return AddressList(code == 0 ? list : nullptr, &::freeaddrinfo);
}

void set_option(const Fd& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

detail::Listening try_to_listen(const Address& address) {
  const detail::Listening made =
      detail::listen_at(address.host, static_cast<uint16_t>(address.port), {.several_hosts = true});
  if (made.fd >= 0) ::fcntl(made.fd, F_SETFL, O_NONBLOCK);
  return made;
}

std::string text_of(const sockaddr* address, socklen_t size, bool with_port) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const int code = ::getnameinfo(address, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (code != 0) return "somebody";
  return with_port ? std::string(host) + ":" + port : host;
}

// A socket for IPv6 writes "::ffff:10.0.0.2" for an address of IPv4.
std::string host_of(const sockaddr_storage& address, socklen_t size) {
  constexpr const char* kMapped = "::ffff:";
  std::string host = text_of(reinterpret_cast<const sockaddr*>(&address), size, false);
  if (host.starts_with(kMapped) && host.find('.') != host.npos) host.erase(0, std::strlen(kMapped));
  return host.starts_with("127.") || host == "::1" || host == "somebody" ? "" : host;
}

}  // namespace

Fd listen_on(const Address& address) {
  const detail::Listening made = try_to_listen(address);
  if (made.fd >= 0) return Fd(made.fd);
  const std::string port = std::to_string(address.port);
  if (made.error == EADDRINUSE) {
    throw LaunchError(kExitFailure, "port " + port + " is in use on " + host_name(),
                      "choose another port, or end the program that listens there: ss -ltnp sport = :" + port);
  }
  throw LaunchError(kExitFailure, "cannot listen on " + address.host + ":" + port + ": " + made.why,
                    made.error == EADDRNOTAVAIL
                        ? "pass an address of this machine to --rendezvous; behind NAT or in a container pass "
                          "0.0.0.0:" +
                              port + " on node 0 and the outside address on the others"
                        : "choose another host or port for --rendezvous");
}

Fd listen_if_mine(const Address& address) {
  const detail::Listening made = try_to_listen(address);
  const bool not_mine = made.error == EADDRNOTAVAIL || made.error == EADDRINUSE || made.error == EAFNOSUPPORT;
  return made.fd >= 0 || not_mine ? Fd(made.fd) : listen_on(address);
}

int port_of(const Fd& socket) {
  return detail::port_of(socket.get());
}

Connecting start_connecting(const Address& address, int attempt) {
  std::string error = "no address";
  const AddressList list = resolve(address.host.c_str(), address.port, error);
  std::string tried = address.host;
  std::vector<const addrinfo*> places;
  for (const addrinfo* place = list.get(); place != nullptr; place = place->ai_next) places.push_back(place);
  for (size_t i = 0; i < places.size(); ++i) {
    const addrinfo& place = *places[(static_cast<size_t>(attempt) + i) % places.size()];
    Fd socket(::socket(place.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) continue;
    tried = text_of(place.ai_addr, place.ai_addrlen, false);
    if (::connect(socket.get(), place.ai_addr, place.ai_addrlen) == 0 || errno == EINPROGRESS) {
      return {std::move(socket), "", tried};
    }
    error = std::strerror(errno);
  }
  return {Fd(), error, tried};
}

std::string connect_error(const Fd& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return std::strerror(error);
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_size = sizeof here;
  socklen_t there_size = sizeof there;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&here), &here_size);
  ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &there_size);
  // Without a listener, a port the kernel also hands out to clients can be reached by itself.
  const bool itself = here_size == there_size && std::memcmp(&here, &there, here_size) == 0;
  return itself ? "nobody listens there" : "";
}

std::string peer_address(const Fd& socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &size) != 0) return "somebody";
  return text_of(reinterpret_cast<sockaddr*>(&there), size, true);
}

std::string peer_host(const Fd& socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there), &size) != 0) return "";
  return host_of(there, size);
}

std::string own_host(const Fd& socket) {
  sockaddr_storage here{};
  socklen_t size = sizeof here;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&here), &size) != 0) return "";
  return host_of(here, size);
}

void keep_alive(const Fd& socket) {
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "this host";
  return name;
}

std::string machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  return std::getline(file, id) ? id : host_name();
}

}  // namespace serried::launch
