// A mark inside a forward: here the tensor lies so.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/mesh/placement.h"

namespace serried {

/// A DTensor brought to `placements`, differentiably; a plain tensor passes, so that the same forward runs on one rank.
/// The gradient comes back as `x` lies, with pending sums done, also where nothing moves in forward: a mark ahead of
/// several consumers makes one reduction of theirs.
///     at::Tensor y = constrain(x, {Shard(1)});
at::Tensor constrain(const at::Tensor& x, const Placements& placements);

}  // namespace serried
