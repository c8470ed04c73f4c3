// From a name to a listening socket.
#include "serried/base/listen.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

namespace serried::detail {
namespace {

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  bool is_v6() const { return bytes.ss_family == AF_INET6; }
  in_addr v4() const { return reinterpret_cast<const sockaddr_in&>(bytes).sin_addr; }
  const in6_addr& v6() const { return reinterpret_cast<const sockaddr_in6&>(bytes).sin6_addr; }

  bool is_loopback() const { return is_v6() ? IN6_IS_ADDR_LOOPBACK(&v6()) : (ntohl(v4().s_addr) >> 24) == 127; }
  bool is_any() const { return is_v6() ? IN6_IS_ADDR_UNSPECIFIED(&v6()) : v4().s_addr == htonl(INADDR_ANY); }

  std::string text() const {
    char name[NI_MAXHOST] = {};
    ::getnameinfo(get(), size, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
    return name;
  }
};

using Addresses = std::vector<SocketAddress>;

// IPv4 before IPv6 for "localhost", which often has both: not every program tries the second.
Addresses resolve(const char* host, uint16_t port, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (code != 0) why = ::gai_strerror(code);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(code == 0 ? list : nullptr, ::freeaddrinfo);
  Addresses addresses;
  for (const addrinfo* entry = owner.get(); entry != nullptr; entry = entry->ai_next) {
    SocketAddress address{.size = entry->ai_addrlen};
    std::memcpy(&address.bytes, entry->ai_addr, entry->ai_addrlen);
    addresses.push_back(address);
  }
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const SocketAddress& a) { return a.is_loopback() && !a.is_v6(); });
  return addresses;
}

// One socket for both families where there is IPv6.
Addresses all_addresses(uint16_t port, std::string& why) {
  Addresses addresses = resolve(nullptr, port, why);
  std::stable_partition(addresses.begin(), addresses.end(), [](const SocketAddress& a) { return a.is_v6(); });
  return addresses;
}

bool means_loopback(const std::string& host) {
  in6_addr ignored{};
  return ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 || ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1 ||
         host == "localhost" || host.starts_with("localhost.") || host.ends_with(".localhost") ||
         host == "ip6-localhost" || host == "ip6-loopback";
}

int open_listener(const SocketAddress& address) {
  const int fd = ::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  const int off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.is_v6()) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(fd, address.get(), address.size) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

SocketAddress name_of(int fd) {
  SocketAddress address{.size = sizeof(sockaddr_storage)};
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.bytes), &address.size) != 0) return {};
  return address;
}

}  // namespace

Listening listen_at(const std::string& host, uint16_t port, const ListenOptions& options) {
  Listening result{.error = EADDRNOTAVAIL, .why = "no address"};
  Addresses addresses = host.empty() ? all_addresses(port, result.why) : resolve(host.c_str(), port, result.why);
  const bool all_loopback =
      std::all_of(addresses.begin(), addresses.end(), [](const auto& a) { return a.is_loopback(); });
  if (options.several_hosts && all_loopback && !addresses.empty() && !means_loopback(host)) {
    addresses = all_addresses(port, result.why);
  }
  for (const SocketAddress& address : addresses) {
    result.fd = open_listener(address);
    if (result.fd >= 0) return {.fd = result.fd};
    result.error = errno;
    result.why = errno == EADDRNOTAVAIL ? address.text() + " is no address of this machine" : std::strerror(errno);
    if (errno == EADDRINUSE) break;
  }
  return result;
}

uint16_t port_of(int fd) {
  int listening = 0;
  socklen_t size = sizeof listening;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening == 0) return 0;
  const SocketAddress address = name_of(fd);
  if (address.is_v6()) return ntohs(reinterpret_cast<const sockaddr_in6&>(address.bytes).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(address.bytes).sin_port);
}

std::string local_address_of(int fd) {
  const SocketAddress address = name_of(fd);
  // A socket for both families answers at the IPv4 loopback too, which is always there.
  return address.is_any() ? "127.0.0.1" : address.text();
}

}  // namespace serried::detail
