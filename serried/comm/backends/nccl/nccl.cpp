// NCCL through c10d, and what stands in for it in a LibTorch that lacks it.
#include "serried/comm/backends/factories.h"

#ifdef USE_C10D_NCCL
#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "serried/base/error.h"

namespace serried {

#ifdef USE_C10D_NCCL

std::string why_nccl_unavailable() {
  return at::hasCUDA() ? "" : "no CUDA device is visible";
}

Group make_nccl_group(const FactoryArgs& args) {
  reject_unknown_options(args, {"high_priority_stream"});
  if (!args.device.is_cuda() || !args.device.has_index()) {
    raise<c10::ValueError>({"new_group", c10::str("\"nccl\" cannot serve device ", args.device),
                            "pass {.device = at::Device(at::kCUDA, local_rank)}"});
  }
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = args.timeout;
  options->group_name = args.name;
  const auto priority = args.options.find("high_priority_stream");
  if (priority != args.options.end()) options->is_high_priority_stream = priority->second.toBool();
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(args.store, args.rank, args.world_size, options);
  backend->setSequenceNumberForGroup();
  backend->eagerConnectSingleDevice(args.device);
  return make_group(args, backend, c10d::ProcessGroup::BackendType::NCCL);
}

#else

std::string why_nccl_unavailable() {
  return "this LibTorch was built without NCCL; the CUDA builds have it";
}

Group make_nccl_group(const FactoryArgs&) {
  raise<c10::NotImplementedError>(
      {"new_group", "\"nccl\" does not work here: " + why_nccl_unavailable(),
       "build serried with a CUDA LibTorch, or use \"auto\", \"shm\" or \"gloo\" on the CPU"});
}

#endif

}  // namespace serried
