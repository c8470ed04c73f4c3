// How the DTensors among a captured function's arguments and results lie on their meshes.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "serried/mesh/layout.h"

namespace serried::graph {

/// What a DTensor is apart from its data, without a live mesh: the nodes of a graph see this rank's part only.
struct DTensorLayout {
  Placements placements = {};   // one per axis of the mesh
  c10::DimVector sizes = {};    // of the whole tensor
  c10::DimVector strides = {};  // of the whole tensor
  Sizes mesh_shape = {};
  std::vector<std::string> mesh_names = {};  // of its axes; empty where they have none
  std::vector<int64_t> mesh_ranks = {};      // row-major, ranks of `group`
  std::string group = {};  // the registered name of the one that the mesh was made over; empty where there is none

  std::string to_string() const;  // "S0 R of [7, 5] on mesh dp=2 tp=2"
  bool operator==(const DTensorLayout&) const = default;
};

/// By number of the argument or result; plain tensors have none.
using DTensorLayouts = std::map<size_t, DTensorLayout>;

/// Communicates nothing.
DTensorLayouts layouts_of(const std::vector<at::Tensor>& tensors);

/// Null for a plain tensor.
const DTensorLayout* find_layout(const DTensorLayouts& layouts, size_t number);

}  // namespace serried::graph
