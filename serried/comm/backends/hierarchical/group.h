// A group of the backend, over any wires.
#pragma once

#include "serried/comm/backends/factories.h"
#include "serried/comm/backends/hierarchical/connect.h"

namespace serried::hierarchical {

/// Options: those of make_hierarchical_group but "wire"; "host" (text): where ranks name different ones, they do as if
/// they could not share memory.
Group make_group_over(const FactoryArgs& args, Options options);

}  // namespace serried::hierarchical
