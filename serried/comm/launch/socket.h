// TCP sockets of the launcher.
#pragma once

#include <string>

#include "serried/comm/launch/fd.h"
#include "serried/comm/launch/options.h"

namespace serried::launch {

/// A listening socket for `address`; port 0: any free one. A loopback host listens there only, any other host on
/// all of this machine's addresses, because a machine's own name often resolves to loopback.
/// LaunchError if the port is in use.
Fd listen_on(const Address& address);

int port_of(const Fd& socket);

/// A socket that is connecting to `address` without blocking, or none with the reason. A host may have several
/// addresses: the `attempt`-th one is tried first.
struct Connecting {
  Fd socket;
  std::string error;
};
Connecting start_connecting(const Address& address, int attempt = 0);

/// Why a socket of `start_connecting` could not connect; "" if it is connected.
std::string connect_error(const Fd& socket);

/// The kernel notices within 30 s when the other machine is gone without a word.
void keep_alive(const Fd& socket);

std::string host_name();

}  // namespace serried::launch
