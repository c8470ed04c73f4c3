// TCP sockets of the launcher.
#pragma once

#include <string>

#include "serried/launch/fd.h"
#include "serried/launch/options.h"

namespace serried::launch {

/// A listening socket for other machines at `address` and nowhere else; port 0: any free one. All of this machine's
/// addresses only for "0.0.0.0" and "::", and for a name that only this machine knows as loopback.
/// LaunchError if the port is in use, or the address is not this machine's.
Fd listen_on(const Address& address);

/// The same where `address` is this machine's and the port is free; nothing where it is not, or the name is not known
/// yet: then another machine, or another launcher of this one, listens there. LaunchError for what forbids to listen.
Fd listen_if_mine(const Address& address);

int port_of(const Fd& socket);

/// A socket that is connecting to `address` without blocking, or none with the reason. A host may have several
/// addresses: the `attempt`-th one is tried first.
struct Connecting {
  Fd socket;
  std::string error;
  std::string place = {};  // the address that was tried
};
Connecting start_connecting(const Address& address, int attempt = 0);

/// Why a socket of `start_connecting` could not connect; "" if it is connected.
std::string connect_error(const Fd& socket);

/// "10.0.0.2:40113", of the other end; "somebody" where the kernel does not know.
std::string peer_address(const Fd& socket);

/// "10.0.0.2", of the other end or of this one; "" for loopback, and where the kernel does not know.
std::string peer_host(const Fd& socket);
std::string own_host(const Fd& socket);

/// The kernel notices within 30 s when the other machine is gone without a word.
void keep_alive(const Fd& socket);

std::string host_name();

/// What names this machine until it is started anew, whatever its name is: the kernel's boot id.
std::string machine_id();

}  // namespace serried::launch
