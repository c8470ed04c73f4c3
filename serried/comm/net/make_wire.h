// Which engine carries the messages of a group.
#pragma once

#include <memory>
#include <string>

#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/net/wire.h"

namespace serried::net {

/// What the plug-in libserried_ucx.so has: the wire of a rank, bound to the device that has this address of the host.
using WireFactory = std::unique_ptr<Wire> (*)(const std::string& address, int rank);

/// Why this process has no UCX; empty: it has, and a wire can be made.
std::string why_no_ucx();

struct WireOptions {
  std::string address = {};     // of this host, as the other ranks see it; empty: found by means of the store
  std::string engine = "auto";  // ucx where every rank has it, else gloo; "gloo": gloo
};

/// This rank's end of a wire among all ranks that meet on the store, connected. Every rank calls it, with a store or
/// prefix of its own for each wire; blocks until all have come, and raises as `detail::exchange` where they do not.
/// All ranks take one engine: gloo if one of them has no UCX or asks for gloo. SERRIED_LOG=comm says which, and why.
std::unique_ptr<Wire> make_wire(const detail::StoreRanks& ranks, const WireOptions& options = {});

}  // namespace serried::net
