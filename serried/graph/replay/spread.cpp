// Spreads: taken from DTensors, as text, and read again.
#include "serried/graph/replay/spread.h"

#include "serried/graph/text/literal.h"
#include "serried/graph/text/possible.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

Spread spread_of(const Spec& spec) {
  const DeviceMesh& mesh = spec.mesh;
  return {.placements = spec.placements,
          .sizes = spec.sizes,
          .strides = spec.strides,
          .mesh_shape = mesh.shape(),
          .mesh_names = mesh.dim_names(),
          .mesh_ranks = mesh.rank_list(),
          .group = mesh.root_group() ? mesh.root_group()->getGroupName() : ""};
}

std::string names_text(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", " : "") + quoted_text(name);
  return text + "]";
}

std::vector<std::string> read_names(Cursor& in) {
  std::vector<std::string> names;
  in.expect("[");
  read_list(in, "]", [&] { names.push_back(read_quoted(in)); });
  return names;
}

Placements read_placements(Cursor& in) {
  const std::string text = read_quoted(in);
  try {
    return parse_placements(text);
  } catch (const c10::ValueError&) {
    in.fail(c10::str("\"", text, "\" are no placements"));
  }
}

bool fills(size_t count, const Sizes& shape) {
  int64_t left = int64_t(count);
  for (int64_t size : shape) {
    if (size < 1 || left % size != 0) return false;
    left /= size;
  }
  return left == 1;
}

void check_mesh(Cursor& in, const Spread& spread) {
  const size_t num_axes = spread.mesh_shape.size();
  const std::string mesh = "a mesh of shape " + numbers_text(spread.mesh_shape);
  if (spread.placements.size() != num_axes) {
    in.fail(c10::str(spread.placements.size(), " placements \"", to_string(spread.placements), "\" for ", mesh));
  }
  if (!spread.mesh_names.empty() && spread.mesh_names.size() != num_axes) {
    in.fail(c10::str(spread.mesh_names.size(), " names ", names_text(spread.mesh_names), " for ", mesh));
  }
  if (!fills(spread.mesh_ranks.size(), spread.mesh_shape)) {
    in.fail(c10::str(spread.mesh_ranks.size(), " ranks for ", mesh));
  }
}

void check_tensor(Cursor& in, const Spread& spread) {
  const int64_t num_dims = int64_t(spread.sizes.size());
  if (spread.strides.size() != spread.sizes.size()) {
    in.fail(c10::str(spread.strides.size(), " strides for a tensor of shape ", numbers_text(spread.sizes)));
  }
  for (const Placement& placement : spread.placements) {
    if (!placement.is_shard() || (placement.dim() >= 0 && placement.dim() < num_dims)) continue;
    in.fail(c10::str("placement ", placement, " for a tensor of shape ", numbers_text(spread.sizes)));
  }
}

}  // namespace

std::string Spread::to_string() const {
  std::string text = c10::str(placements, " of ", numbers_text(sizes), " on mesh ");
  if (mesh_names.empty()) return text + c10::Join("x", mesh_shape);
  for (size_t axis = 0; axis < mesh_shape.size(); ++axis) {
    text += c10::str(axis > 0 ? " " : "", mesh_names[axis], "=", mesh_shape[axis]);
  }
  return text;
}

Spreads spreads_of(const std::vector<at::Tensor>& tensors) {
  Spreads spreads;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (const SpecPtr spec = spec_of(tensors[i])) spreads.emplace(i, spread_of(*spec));
  }
  return spreads;
}

const Spread* find_spread(const Spreads& spreads, size_t number) {
  const auto found = spreads.find(number);
  return found == spreads.end() ? nullptr : &found->second;
}

std::string spread_text(const Spread& spread) {
  std::string text = quoted_text(serried::to_string(spread.placements)) + " of " + numbers_text(spread.sizes);
  if (spread.strides != serried::contiguous_strides(spread.sizes)) text += " strides " + numbers_text(spread.strides);
  text += " on " + numbers_text(spread.mesh_shape);
  if (!spread.mesh_names.empty()) text += " names " + names_text(spread.mesh_names);
  text += " ranks " + numbers_text(spread.mesh_ranks);
  return spread.group.empty() ? text : text + " group " + quoted_text(spread.group);
}

Spread read_spread(Cursor& in) {
  Spread spread;
  spread.placements = read_placements(in);
  in.expect("of");
  spread.sizes = read_numbers(in);
  if (!is_possible_shape(spread.sizes)) in.fail("no tensor has the shape " + numbers_text(spread.sizes));
  spread.strides = in.accept("strides ") ? read_numbers(in) : serried::contiguous_strides(spread.sizes);
  in.expect("on");
  const c10::DimVector shape = read_numbers(in);
  spread.mesh_shape.assign(shape.begin(), shape.end());
  if (in.accept("names ")) spread.mesh_names = read_names(in);
  in.expect("ranks");
  const c10::DimVector ranks = read_numbers(in);
  spread.mesh_ranks.assign(ranks.begin(), ranks.end());
  if (in.accept("group ")) spread.group = read_quoted(in);
  check_tensor(in, spread);
  check_mesh(in, spread);
  return spread;
}

}  // namespace serried::graph
