// Moves the state of ranks that have it to those that do not, all sources at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::detail {

struct Route {
  std::vector<int> sources;
  std::vector<int> receivers;
};

/// The bytes `from` has at the sources, into those of the same sizes at the receivers. They travel as one stream, cut
/// into pieces: piece p comes from source p mod S, two of a source are under way at a time. Ranks that are neither do
/// nothing.
void move_state(const std::vector<at::Tensor>& bytes, const Route& route, const Group& group,
                int64_t piece_bytes = int64_t(4) << 20);

}  // namespace serried::detail
