// Taken from a DTensor's spec.
#include "serried/graph/dtensor_layout.h"

#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

DTensorLayout layout_of(const Spec& spec) {
  const DeviceMesh& mesh = spec.mesh;
  return {.placements = spec.placements,
          .sizes = spec.sizes,
          .strides = spec.strides,
          .mesh_shape = mesh.shape(),
          .mesh_names = mesh.dim_names(),
          .mesh_ranks = mesh.rank_list(),
          .group = mesh.root_group() ? mesh.root_group()->getGroupName() : ""};
}

}  // namespace

std::string DTensorLayout::to_string() const {
  std::string text = c10::str(placements, " of ", c10::IntArrayRef(sizes), " on mesh ");
  if (mesh_names.empty()) return text + c10::Join("x", mesh_shape);
  for (size_t axis = 0; axis < mesh_shape.size(); ++axis) {
    text += c10::str(axis > 0 ? " " : "", mesh_names[axis], "=", mesh_shape[axis]);
  }
  return text;
}

DTensorLayouts layouts_of(const std::vector<at::Tensor>& tensors) {
  DTensorLayouts layouts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (const SpecPtr spec = spec_of(tensors[i])) layouts.emplace(i, layout_of(*spec));
  }
  return layouts;
}

const DTensorLayout* find_layout(const DTensorLayouts& layouts, size_t number) {
  const auto found = layouts.find(number);
  return found == layouts.end() ? nullptr : &found->second;
}

}  // namespace serried::graph
