// The backend is that of shm, with an engine that reaches other hosts.
#include "serried/comm/backends/hierarchical/group.h"

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/backends/shm/options.h"

namespace serried::hierarchical {

Group make_group_over(const FactoryArgs& args, Options options) {
  reject_unknown_options(args, {"always_stage", "heap_mb", "host", "order"});
  const auto host = args.options.find("host");
  if (host != args.options.end()) options.pretended_host = host->second.toStringRef();
  const auto order = args.options.find("order");
  options.order = parse_order("hierarchical",
                              order == args.options.end() ? env::text("SERRIED_ORDER") : order->second.toStringRef());
  shm::ConnectArgs connect_args = shm::connect_args(args, "hierarchical");
  connect_args.connect = [options](const shm::ConnectArgs& of_group) { return connect(of_group, options); };
  return make_group(args, c10::make_intrusive<shm::ShmBackend>(connect_args));
}

}  // namespace serried::hierarchical
