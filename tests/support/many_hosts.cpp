// Hosts without hosts: ranks that are threads, and wires between threads, or through the loopback device.
#include "tests/support/many_hosts.h"

#include <cstdlib>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/net/make_wire.h"

namespace serried::testing {

std::unique_ptr<ThreadWire> connected_thread_wire(const shm::ConnectArgs& args) {
  auto wire = std::make_unique<ThreadWire>(args.rank);
  const detail::StoreRanks ranks{args.store, args.rank, args.world_size, args.timeout};
  wire->connect(detail::exchange(ranks, "new_group", "thread wire", wire->address()));
  return wire;
}

std::unique_ptr<net::Wire> connected_wire(const shm::ConnectArgs& args, const std::string& kind) {
  if (kind == "threads") return connected_thread_wire(args);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("wire", args.store);
  auto wire = net::make_wire({store, args.rank, args.world_size, args.timeout},
                             {.address = "127.0.0.1", .engine = kind == "gloo" ? "gloo" : "auto"});
  TORCH_CHECK(kind == wire->name(), "there is no wire of ", kind, " here");
  return wire;
}

std::unique_ptr<net::Wire> connected_wire(const shm::ConnectArgs& args) {
  const char* kind = std::getenv("SERRIED_TEST_WIRE");
  return connected_wire(args, kind == nullptr ? "threads" : kind);
}

Group make_group_of_hosts(const FactoryArgs& args, const HostLayout& layout) {
  FactoryArgs placed = args;
  placed.options["host"] = std::to_string(layout.host_of(args.rank, args.world_size));
  // In some layouts ranks reach tensors of their neighbours, in one they stage them.
  placed.options["always_stage"] = layout.backend == std::string("hierarchical_pairs");
  return hierarchical::make_group_over(
      placed, {.make_wire = [](const shm::ConnectArgs& of_group) { return connected_wire(of_group); }});
}

HostLayoutBackends::HostLayoutBackends() {
  for (const HostLayout& layout : kHostLayouts) {
    register_backend(layout.backend, [&](const FactoryArgs& args) { return make_group_of_hosts(args, layout); });
  }
}

HostLayoutBackends::~HostLayoutBackends() {
  for (const HostLayout& layout : kHostLayouts) unregister_backend(layout.backend);
}

}  // namespace serried::testing
