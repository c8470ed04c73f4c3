// Messages by gloo, which every build of LibTorch has: for hosts without UCX.
#pragma once

#include <memory>

#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/net/wire.h"

namespace serried::net {

/// Blocks until all ranks have come; DistBackendError where they cannot be connected. `address` is this host's as peers
/// see it. The wire has two threads per peer and copies each message twice; its `connect` has nothing to do.
std::unique_ptr<Wire> make_gloo_wire(const detail::StoreRanks& ranks, const std::string& address);

}  // namespace serried::net
