// What ops tell the CommDebugModes of their thread.
#pragma once

#include <string>

#include "serried/tensor/spec.h"

namespace serried::comm_debug {

/// `op` sends an input from `from` to `to`; cheap where there is no mode.
void note_redistribution(const std::string& op, const Spec& from, const Placements& to, bool implicit);

/// `op` takes the replicate default.
void note_default(const std::string& op);

}  // namespace serried::comm_debug
