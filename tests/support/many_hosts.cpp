// Hosts without hosts: ranks that are threads, and wires between threads.
#include "tests/support/many_hosts.h"

#include <string>

#include "serried/comm/agree/rank_texts.h"

namespace serried::testing {

std::unique_ptr<ThreadWire> connected_thread_wire(const shm::ConnectArgs& args) {
  auto wire = std::make_unique<ThreadWire>(args.rank);
  const detail::StoreRanks ranks{args.store, args.rank, args.world_size, args.timeout};
  wire->connect(detail::exchange(ranks, "new_group", "thread wire", wire->address()));
  return wire;
}

Group make_group_of_hosts(const FactoryArgs& args, const HostLayout& layout) {
  FactoryArgs placed = args;
  placed.options["host"] = std::to_string(layout.host_of(args.rank, args.world_size));
  // In some layouts ranks reach tensors of their neighbours, in one they stage them.
  placed.options["always_stage"] = layout.backend == std::string("hierarchical_pairs");
  return hierarchical::make_group_over(placed, {.make_wire = connected_thread_wire});
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
