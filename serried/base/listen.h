// Listening at the address that was asked for, and at no other. Free of LibTorch: the launcher uses it too.
#pragma once

#include <cstdint>
#include <string>

namespace serried::detail {

struct ListenOptions {
  /// Ranks of other machines are to come: then a name of this machine that only this machine knows as loopback (Debian
  /// writes 127.0.1.1 for it) stands for all of its addresses.
  bool several_hosts = false;
};

struct Listening {
  int fd = -1;           // closed by exec
  int error = 0;         // errno, where there is no fd
  std::string why = {};  // the same in words
};

/// Listens at `port` (0: any free one) of the address that `host` names: loopback for "localhost" and "127.0.0.1", all
/// addresses only for "0.0.0.0", "::" and "", else one address of this machine.
Listening listen_at(const std::string& host, uint16_t port, const ListenOptions& options = {});

/// The port that a listening socket has; 0 if `fd` is none.
uint16_t port_of(int fd);

/// The address by which this machine reaches a listening socket: "127.0.0.1", "::1", "10.0.0.7".
std::string local_address_of(int fd);

}  // namespace serried::detail
