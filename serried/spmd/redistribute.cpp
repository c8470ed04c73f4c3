// Redistribution between two lists of placements: checks, texts, and the boxes that exchanges cut along.
#include "serried/spmd/redistribute.h"

#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include "serried/base/error.h"
#include "serried/spmd/redistribution_search.h"

namespace serried::spmd {
namespace {

const char* name_of(Step::Kind kind) {
  switch (kind) {
    case Step::Kind::slice: return "slice";
    case Step::Kind::all_gather: return "all_gather";
    case Step::Kind::all_reduce: return "all_reduce";
    case Step::Kind::reduce_scatter: return "reduce_scatter";
    case Step::Kind::all_to_all: return "all_to_all";
    case Step::Kind::to_partial: return "to_partial";
    case Step::Kind::exchange: return "exchange";
  }
  return "?";
}

void check(const Placements& from, const Placements& to, c10::IntArrayRef mesh_shape) {
  if (from.size() != to.size() || to.size() != mesh_shape.size()) {
    raise<c10::ValueError>({"redistribute",
                            c10::str("the mesh has ", mesh_shape.size(), " axes, and the placements are \"",
                                     to_string(from), "\" and \"", to_string(to), "\""),
                            "pass one placement per mesh axis"});
  }
  for (size_t axis = 0; axis < to.size(); ++axis) {
    if (!from[axis].is_partial() || !to[axis].is_partial() || from[axis] == to[axis]) continue;
    if (mesh_shape[axis] == 1) continue;
    raise<c10::ValueError>({"redistribute",
                            c10::str("cannot turn ", to_string(from[axis]), " into ", to_string(to[axis]), " on axis ",
                                     axis, ": one pending reduction does not become another"),
                            "redistribute to R first"});
  }
}

}  // namespace

std::string to_string(const Step& step) {
  return c10::str(to_string(step.before), " -> ", to_string(step.after), ": ", name_of(step.kind), " over ",
                  step.axes.size() == 1 ? "axis " : "axes ", c10::Join(", ", step.axes));
}

std::string to_string(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) text += (text.empty() ? "" : "; ") + to_string(step);
  return text;
}

bool communicates(const Step& step) {
  return step.kind != Step::Kind::slice && step.kind != Step::Kind::to_partial;
}

int64_t bytes_sent(const Step& step, c10::IntArrayRef sizes, c10::ScalarType dtype, c10::IntArrayRef mesh_shape) {
  int64_t ranks = 1, parts = 1, parts_elsewhere = 1;
  for (size_t axis = 0; axis < step.before.size(); ++axis) {
    const bool involved = std::find(step.axes.begin(), step.axes.end(), int64_t(axis)) != step.axes.end();
    if (involved) ranks *= mesh_shape[axis];
    if (!step.before[axis].is_shard()) continue;
    parts *= mesh_shape[axis];
    if (!involved) parts_elsewhere *= mesh_shape[axis];
  }
  const int64_t whole = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
  if (step.kind == Step::Kind::exchange) return (whole + parts - 1) / parts;
  return bytes_sent(step.from, step.to, (whole + parts_elsewhere - 1) / parts_elsewhere, ranks);
}

std::vector<Step> redistribution(c10::IntArrayRef sizes, const Placements& from, const Placements& to,
                                 c10::IntArrayRef mesh_shape, const std::vector<CostModel>& costs) {
  check(from, to, mesh_shape);
  Placements start = from;
  // One rank alone holds the same whatever the placement is called.
  for (size_t axis = 0; axis < to.size(); ++axis) {
    if (mesh_shape[axis] == 1) start[axis] = to[axis];
  }
  if (start == to) return {};
  return detail::cheapest_steps(sizes, start, to, mesh_shape, costs);
}

std::vector<Box> owned_boxes(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at) {
  std::vector<Box> boxes{Box{}};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const std::vector<Span> spans = owned_spans(sizes[dim], int64_t(dim), placements, at);
    std::vector<Box> longer;
    longer.reserve(boxes.size() * spans.size());
    for (const Box& box : boxes) {
      for (const Span& span : spans) {
        longer.push_back(box);
        longer.back().push_back(span);
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  for (size_t dim = 0; dim < a.size(); ++dim) {
    const int64_t begin = std::max(a[dim].begin, b[dim].begin);
    const int64_t end = std::min(a[dim].end(), b[dim].end());
    if (end <= begin) return std::nullopt;
    common.push_back({begin, end - begin});
  }
  return common;
}

}  // namespace serried::spmd
