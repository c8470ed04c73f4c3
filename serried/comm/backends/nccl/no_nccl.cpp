// Stands in for NCCL in a LibTorch that lacks it.
#include "serried/comm/backends/nccl/nccl.h"

#ifndef USE_C10D_NCCL

#include "serried/base/error.h"

namespace serried {

std::string why_nccl_unavailable() {
  return "this LibTorch was built without NCCL; the CUDA builds have it";
}

Group make_nccl_group(const FactoryArgs&) {
  raise<c10::NotImplementedError>(
      {"new_group", "\"nccl\" does not work here: " + why_nccl_unavailable(),
       "build serried with a CUDA LibTorch, or use \"auto\", \"shm\" or \"gloo\" on the CPU"});
}

}  // namespace serried

#endif
