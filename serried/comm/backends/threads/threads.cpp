// The factory of the threads backend.
#include "serried/comm/backends/threads/threads.h"

#include "serried/comm/backends/shm/backend.h"

namespace serried {

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
