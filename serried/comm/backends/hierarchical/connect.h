// How ranks find out who shares a host with them, and come to reach the others.
#pragma once

#include "serried/comm/backends/hierarchical/order.h"
#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/connect.h"
#include "serried/comm/net/wire.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace serried::hierarchical {

struct Options {
  /// This rank's end of a wire, connected; called where there are several hosts, on all ranks.
  std::function<std::unique_ptr<net::Wire>(const shm::ConnectArgs&)> make_wire;
  /// For tests: ranks that name different hosts do as if they could not share memory.
  std::string pretended_host = {};
  std::optional<Order> order = {};
};

/// An engine whose peers are all there: that of shm where all ranks share a host. Every rank calls it; if one cannot
/// take part, all raise and say which and why.
std::unique_ptr<shm::Runner> connect(const shm::ConnectArgs& args, const Options& options);

}  // namespace serried::hierarchical
