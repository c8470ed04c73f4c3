// Writes all of a layout, and reads only what can be.
#include "serried/graph/text/layout_text.h"

#include <algorithm>

namespace serried::graph {
namespace {

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

void check_mesh(Cursor& in, const DTensorLayout& layout) {
  const size_t num_axes = layout.mesh_shape.size();
  const std::string mesh = "a mesh of shape " + numbers_text(layout.mesh_shape);
  if (layout.placements.size() != num_axes) {
    in.fail(c10::str(layout.placements.size(), " placements \"", to_string(layout.placements), "\" for ", mesh));
  }
  if (!layout.mesh_names.empty() && layout.mesh_names.size() != num_axes) {
    in.fail(c10::str(layout.mesh_names.size(), " names ", names_text(layout.mesh_names), " for ", mesh));
  }
  if (!fills(layout.mesh_ranks.size(), layout.mesh_shape)) {
    in.fail(c10::str(layout.mesh_ranks.size(), " ranks for ", mesh));
  }
}

void check_tensor(Cursor& in, const DTensorLayout& layout) {
  const int64_t num_dims = int64_t(layout.sizes.size());
  if (layout.strides.size() != layout.sizes.size()) {
    in.fail(c10::str(layout.strides.size(), " strides for a tensor of shape ", numbers_text(layout.sizes)));
  }
  for (const Placement& placement : layout.placements) {
    if (!placement.is_shard() || (placement.dim() >= 0 && placement.dim() < num_dims)) continue;
    in.fail(c10::str("placement ", placement, " for a tensor of shape ", numbers_text(layout.sizes)));
  }
}

// Adds (size - 1) * stride to `last`; false where that is no number.
bool add_reach(int64_t size, int64_t stride, int64_t& last) {
  int64_t reach = 0;
  return stride >= 0 && !__builtin_mul_overflow(size - 1, stride, &reach) &&
         !__builtin_add_overflow(last, reach, &last);
}

}  // namespace

std::string layout_text(const DTensorLayout& layout) {
  std::string text = quoted_text(serried::to_string(layout.placements)) + " of " + numbers_text(layout.sizes);
  if (layout.strides != serried::contiguous_strides(layout.sizes)) text += " strides " + numbers_text(layout.strides);
  text += " on " + numbers_text(layout.mesh_shape);
  if (!layout.mesh_names.empty()) text += " names " + names_text(layout.mesh_names);
  text += " ranks " + numbers_text(layout.mesh_ranks);
  return layout.group.empty() ? text : text + " group " + quoted_text(layout.group);
}

DTensorLayout read_layout(Cursor& in) {
  DTensorLayout layout;
  layout.placements = read_placements(in);
  in.expect("of");
  layout.sizes = read_numbers(in);
  if (!is_possible_shape(layout.sizes)) in.fail("no tensor has the shape " + numbers_text(layout.sizes));
  layout.strides = in.accept("strides ") ? read_numbers(in) : serried::contiguous_strides(layout.sizes);
  in.expect("on");
  const c10::DimVector shape = read_numbers(in);
  layout.mesh_shape.assign(shape.begin(), shape.end());
  if (in.accept("names ")) layout.mesh_names = read_names(in);
  in.expect("ranks");
  const c10::DimVector ranks = read_numbers(in);
  layout.mesh_ranks.assign(ranks.begin(), ranks.end());
  if (in.accept("group ")) layout.group = read_quoted(in);
  check_tensor(in, layout);
  check_mesh(in, layout);
  return layout;
}

// Overflow is asked for before it happens.
bool is_possible_shape(c10::IntArrayRef sizes, int64_t each) {
  for (int64_t size : sizes) {
    // An empty dim does not make the others small: strides count past it.
    if (size < 0 || __builtin_mul_overflow(each, std::max<int64_t>(size, 1), &each)) return false;
  }
  return true;
}

bool is_possible(const TensorMeta& meta) {
  const int64_t each = int64_t(c10::elementSize(meta.dtype));
  if (meta.offset < 0 || !is_possible_shape(meta.sizes, each)) return false;
  if (meta.strides.empty()) return true;
  if (meta.strides.size() != meta.sizes.size()) return false;
  int64_t last = meta.offset;
  for (size_t d = 0; d < meta.sizes.size(); ++d) {
    if (!add_reach(std::max<int64_t>(meta.sizes[d], 1), meta.strides[d], last)) return false;
  }
  int64_t bytes = 0;
  return !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, each, &bytes);
}

}  // namespace serried::graph
