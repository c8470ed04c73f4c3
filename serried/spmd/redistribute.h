// How a tensor gets from one list of placements to another: a list of steps, each one collective or one local cut.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "serried/mesh/layout.h"
#include "serried/spmd/cost.h"

namespace serried::spmd {

struct Step {
  enum class Kind : uint8_t {
    slice,           // Replicate -> Shard: a local cut
    all_gather,      // Shard -> Replicate
    all_reduce,      // Partial -> Replicate
    reduce_scatter,  // Partial -> Shard
    all_to_all,      // Shard(i) -> Shard(j)
    to_partial,      // Replicate -> Partial: the value on the first rank, the identity on the others
    exchange,        // any shards -> any shards over several axes at once, piece by piece (chunk intersection)
  };
  Kind kind;
  std::vector<int64_t> axes;  // ascending; several: one collective over their merged group
  Placement from, to;         // on those axes (the same on each); unused by exchange
  Placements before, after;   // of the whole tensor
};

/// "S0 R -> R R: all_gather over axis 0"
std::string to_string(const Step& step);
std::string to_string(const std::vector<Step>& steps);

/// The steps from `from` to `to` for a tensor of `sizes`; none where they are equal. Neighbouring steps of one kind
/// over several axes are merged where the result is exact for these sizes. ValueError for Shard -> Partial of a kind
/// without identity and for Partial -> another Partial. `costs` has a model per axis, or none: cost_model() on all.
std::vector<Step> redistribution(c10::IntArrayRef sizes, const Placements& from, const Placements& to,
                                 c10::IntArrayRef mesh_shape, const std::vector<CostModel>& costs = {});

/// Whether other ranks take part in it.
bool communicates(const Step& step);

/// Bytes one rank sends for `step` of a tensor of `sizes`, by the model that steps are chosen by.
int64_t bytes_sent(const Step& step, c10::IntArrayRef sizes, c10::ScalarType dtype, c10::IntArrayRef mesh_shape);

/// Rectangles of global indices: what one rank sends another. One Span per dim.
using Box = c10::SmallVector<Span, 4>;

/// All boxes a rank holds (several only where a cut is strided), row-major.
std::vector<Box> owned_boxes(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at);

/// The common part; no value where there is none.
std::optional<Box> intersect(const Box& a, const Box& b);

}  // namespace serried::spmd
