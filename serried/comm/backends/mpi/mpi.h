// The place of an MPI backend; this version has none.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// NotImplementedError that says what to use instead.
Group make_mpi_group(const FactoryArgs& args);

std::string why_mpi_unavailable();

}  // namespace serried
