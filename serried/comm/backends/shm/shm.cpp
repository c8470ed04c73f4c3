// The factories of shm and threads, which share an engine.
#include "serried/comm/backends/factories.h"

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/backends/shm/options.h"

namespace serried {

shm::ConnectArgs shm::connect_args(const FactoryArgs& args, const std::string& backend) {
  const auto heap = args.options.find("heap_mb");
  const int64_t heap_mb = heap == args.options.end() ? env::integer("SERRIED_SHM_HEAP_MB") : heap->second.toInt();
  if (heap_mb < 0 || heap_mb > shm::kMaxHeapBytes >> 20) {
    raise<c10::ValueError>({backend, c10::str("heap_mb is ", heap_mb),
                            c10::str("pass 0 to ", shm::kMaxHeapBytes >> 20, "; memory is taken on use")});
  }
  const auto stage = args.options.find("always_stage");
  shm::ConnectArgs connect;
  connect.store = args.store;
  connect.rank = args.rank;
  connect.world_size = args.world_size;
  connect.timeout = args.timeout;
  connect.heap_bytes = heap_mb << 20;
  connect.always_stage = stage != args.options.end() && stage->second.toBool();
  connect.backend = backend;
  return connect;
}

Group make_shm_group(const FactoryArgs& args) {
  reject_unknown_options(args, {"heap_mb", "always_stage"});
  return make_group(args, c10::make_intrusive<shm::ShmBackend>(shm::connect_args(args, "shm")));
}

std::string why_shm_unavailable() {
  constexpr int64_t kProbeBytes = 4096;
  const detail::SharedMemory made = detail::SharedMemory::make("serried-probe", kProbeBytes);
  if (!made.has_file()) return "no sealed memory from memfd_create: " + made.problem();
  return detail::SharedMemory::open(made.place(), kProbeBytes).problem();
}

Group make_threads_group(const FactoryArgs& args) {
  reject_unknown_options(args, {});
  shm::ConnectArgs connect = shm::connect_args(args, "threads");
  // Every tensor of the process is as good as one of a heap.
  connect.heap_bytes = 64 << 20;
  connect.one_process = true;
  return make_group(args, c10::make_intrusive<shm::ShmBackend>(connect));
}

}  // namespace serried
