// How the DTensors among a captured function's arguments and results lie on their meshes.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "serried/mesh/layout.h"

namespace serried::graph {

class Cursor;

/// What a DTensor is apart from its data, without a live mesh: the nodes of a graph see this rank's part only.
struct Spread {
  Placements placements = {};   // one per axis of the mesh
  c10::DimVector sizes = {};    // of the whole tensor
  c10::DimVector strides = {};  // of the whole tensor
  Sizes mesh_shape = {};
  std::vector<std::string> mesh_names = {};  // of its axes; empty where they have none
  std::vector<int64_t> mesh_ranks = {};      // row-major, ranks of `group`
  std::string group = {};  // the registered name of the one that the mesh was made over; empty where there is none

  std::string to_string() const;  // "S0 R of [7, 5] on mesh dp=2 tp=2"
  bool operator==(const Spread&) const = default;
};

/// By number of the argument or result; plain tensors have none.
using Spreads = std::map<size_t, Spread>;

/// Communicates nothing.
Spreads spreads_of(const std::vector<at::Tensor>& tensors);

/// Null for a plain tensor.
const Spread* find_spread(const Spreads& spreads, size_t number);

/// The same for files.
///     "S0 R" of [7, 5] on [2, 2] names ["dp", "tp"] ranks [0, 1, 2, 3] group "threads/1"
std::string spread_text(const Spread& spread);
/// What `spread_text` wrote; fails at `in` where it does not agree with itself.
Spread read_spread(Cursor& in);

}  // namespace serried::graph
