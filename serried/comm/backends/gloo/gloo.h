// The gloo backend: c10d's Gloo with the watch around it.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// Options: "threads" (int, 2), "interface" (a network interface), "hostname" (a name or address of this host).
/// Without an address it takes loopback where all ranks share a host, else GLOO_SOCKET_IFNAME or the host's own name.
Group make_gloo_group(const FactoryArgs& args);

}  // namespace serried
