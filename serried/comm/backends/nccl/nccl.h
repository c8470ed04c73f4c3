// c10d's NCCL as a backend, where LibTorch has it.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// A group over NCCL for args.device, connected before it returns. NotImplementedError where LibTorch lacks NCCL.
Group make_nccl_group(const FactoryArgs& args);

std::string why_nccl_unavailable();

}  // namespace serried
