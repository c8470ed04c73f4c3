// The factories of shm and threads, which share an engine.
#include "serried/comm/backends/factories.h"

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/backends/shm/backend.h"

namespace serried {

Group make_shm_group(const FactoryArgs& args) {
  reject_unknown_options(args, {"heap_mb", "always_stage"});
  const auto heap = args.options.find("heap_mb");
  const int64_t heap_mb = heap == args.options.end() ? env::integer("SERRIED_SHM_HEAP_MB") : heap->second.toInt();
  if (heap_mb < 0 || heap_mb > shm::kMaxHeapBytes >> 20) {
    raise<c10::ValueError>({"shm", c10::str("heap_mb is ", heap_mb),
                            c10::str("pass 0 to ", shm::kMaxHeapBytes >> 20, "; memory is taken on use")});
  }
  const auto stage = args.options.find("always_stage");
  const shm::ConnectArgs connect{.store = args.store,
                                 .rank = args.rank,
                                 .world_size = args.world_size,
                                 .timeout = args.timeout,
                                 .heap_bytes = heap_mb << 20,
                                 .always_stage = stage != args.options.end() && stage->second.toBool(),
                                 .one_process = false,
                                 .backend = "shm"};
  return make_group(args, c10::make_intrusive<shm::ShmBackend>(connect));
}

std::string why_shm_unavailable() {
  constexpr int64_t kProbeBytes = 4096;
  const detail::SharedMemory made = detail::SharedMemory::make("serried-probe", kProbeBytes);
  if (!made.has_file()) return "no sealed memory from memfd_create: " + made.problem();
  return detail::SharedMemory::open(made.place(), kProbeBytes).problem();
}

Group make_threads_group(const FactoryArgs& args) {
  reject_unknown_options(args, {});
  const shm::ConnectArgs connect{.store = args.store,
                                 .rank = args.rank,
                                 .world_size = args.world_size,
                                 .timeout = args.timeout,
                                 // Every tensor of the process is as good as one of a heap.
                                 .heap_bytes = 64 << 20,
                                 .always_stage = false,
                                 .one_process = true,
                                 .backend = "threads"};
  return make_group(args, c10::make_intrusive<shm::ShmBackend>(connect));
}

}  // namespace serried
