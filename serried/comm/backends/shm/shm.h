// The shm backend: ranks of one host talk through memory they share.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// Options: "heap_mb" (int, SERRIED_SHM_HEAP_MB): address space per rank for `allocateTensor`; memory is taken on use.
/// "always_stage" (bool, false): copy through the segment also where ranks are threads that could reach each other.
Group make_shm_group(const FactoryArgs& args);

/// Why this process cannot share memory; empty where it can.
std::string why_shm_unavailable();

}  // namespace serried
