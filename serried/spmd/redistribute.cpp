// The steps between two lists of placements, found by Dijkstra. Every edge is one step that is exact for any sizes, so
// every path is right and only cost decides; merged collectives are edges of their own and win by saving latency.
#include "serried/spmd/redistribute.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>

#include "serried/base/error.h"

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

using Axes = std::vector<int64_t>;

// The search does not know the dtype; only ratios to latency depend on it.
constexpr double kElementBytes = 4;
// An exchange packs and unpacks piece by piece: where a plain collective moves as much, that one wins.
constexpr double kExchangeLatency = 1.5;

bool contains(const Axes& axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

// Cuts nest left to right, so a cut is undone or made without touching others only where it is the innermost of its
// dim: then parts are consecutive pieces of one sequence, whatever their sizes.
bool is_innermost(const Placements& placements, const Axes& axes, int64_t dim) {
  for (int64_t axis = axes.front() + 1; axis < int64_t(placements.size()); ++axis) {
    if (placements[axis].is_shard(dim) && !contains(axes, axis)) return false;
  }
  return true;
}

bool is_plain_shard(const Placement& p) {
  return p.is_shard() && !p.is_strided();
}

// Whether one reduction can serve axes of both kinds.
bool reduce_together(ReduceKind a, ReduceKind b) {
  const auto adds = [](ReduceKind kind) { return kind == ReduceKind::sum || kind == ReduceKind::avg; };
  return a == b || (adds(a) && adds(b));
}

// Dijkstra over placements.
class Search {
 public:
  Search(c10::IntArrayRef sizes, const Placements& to, c10::IntArrayRef mesh_shape, const std::vector<CostModel>& costs)
      : to_(to), mesh_shape_(mesh_shape), bytes_(kElementBytes), costs_(costs) {
    if (costs_.empty()) costs_.assign(mesh_shape.size(), cost_model());
    for (int64_t size : sizes) bytes_ *= double(size);
  }

  std::vector<Step> run(const Placements& from) {
    nodes_.push_back({from, 0, -1, false, {}});
    for (;;) {
      const int next = nearest();
      nodes_[next].done = true;
      if (nodes_[next].at == to_) return path_to(next);
      expand(next);
    }
  }

 private:
  struct Node {
    Placements at;
    double cost;
    int previous;
    bool done;
    Step step;  // that led here
  };

  int nearest() const {
    int best = -1;
    for (int i = 0; i < int(nodes_.size()); ++i) {
      if (!nodes_[i].done && (best < 0 || nodes_[i].cost < nodes_[best].cost)) best = i;
    }
    return best;
  }

  std::vector<Step> path_to(int node) const {
    std::vector<Step> steps;
    for (; nodes_[node].previous >= 0; node = nodes_[node].previous) steps.push_back(nodes_[node].step);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  void expand(int from) {
    from_ = from;
    now_ = nodes_[from].at;
    Axes open;
    for (int64_t axis = 0; axis < int64_t(to_.size()); ++axis) {
      if (now_[axis] != to_[axis]) open.push_back(axis);
    }
    for (uint64_t mask = 1; mask < uint64_t(1) << open.size(); ++mask) {
      Axes axes;
      for (size_t i = 0; i < open.size(); ++i) {
        if (mask >> i & 1) axes.push_back(open[i]);
      }
      try_on(axes);
    }
    for (int64_t axis : open) try_exchange({axis});
    try_exchange(open);
  }

  void try_on(const Axes& axes) {
    const Placement& p = now_[axes.front()];
    if (p.is_replicate()) {
      try_slice(axes);
      try_to_partial(axes);
    }
    if (p.is_partial() && one_reduction(axes)) {
      add(Step::Kind::all_reduce, axes, moved(axes, nullptr));
      try_reduce_scatter(axes);
    }
    if (is_plain_shard(p) && all_are(now_, axes, p) && is_innermost(now_, axes, p.dim())) {
      add(Step::Kind::all_gather, axes, moved(axes, nullptr));
      try_all_to_all(axes);
    }
  }

  // To Replicate, or to the target.
  Placements moved(const Axes& axes, const Placements* target) const {
    Placements after = now_;
    for (int64_t axis : axes) after[axis] = target == nullptr ? Replicate() : (*target)[axis];
    return after;
  }

  static bool all_are(const Placements& placements, const Axes& axes, const Placement& p) {
    return std::all_of(axes.begin(), axes.end(), [&](int64_t axis) { return placements[axis] == p; });
  }

  bool one_reduction(const Axes& axes) const {
    return std::all_of(axes.begin(), axes.end(), [&](int64_t axis) {
      return now_[axis].is_partial() && reduce_together(now_[axis].reduce(), now_[axes.front()].reduce());
    });
  }

  // Whether the cuts that the target makes on `axes` are the innermost of their dims.
  bool cuts_inside(const Axes& axes, const Placements& after) const {
    for (int64_t axis : axes) {
      Axes of_dim;
      for (int64_t other : axes) {
        if (after[other].is_shard(after[axis].dim())) of_dim.push_back(other);
      }
      if (!is_innermost(after, of_dim, after[axis].dim())) return false;
    }
    return true;
  }

  void try_slice(const Axes& axes) {
    for (int64_t axis : axes) {
      if (!now_[axis].is_replicate() || !to_[axis].is_shard()) return;
    }
    const Placements after = moved(axes, &to_);
    if (cuts_inside(axes, after)) add(Step::Kind::slice, axes, after);
  }

  void try_to_partial(const Axes& axes) {
    if (!to_[axes.front()].is_partial() || !all_are(to_, axes, to_[axes.front()]) || !all_are(now_, axes, Replicate()))
      return;
    add(Step::Kind::to_partial, axes, moved(axes, &to_));
  }

  void try_reduce_scatter(const Axes& axes) {
    const Placement& target = to_[axes.front()];
    if (!is_plain_shard(target) || !all_are(to_, axes, target)) return;
    const Placements after = moved(axes, &to_);
    if (cuts_inside(axes, after)) add(Step::Kind::reduce_scatter, axes, after);
  }

  void try_all_to_all(const Axes& axes) {
    const Placement& target = to_[axes.front()];
    if (!is_plain_shard(target) || !all_are(to_, axes, target) || target.dim() == now_[axes.front()].dim()) return;
    const Placements after = moved(axes, &to_);
    if (cuts_inside(axes, after)) add(Step::Kind::all_to_all, axes, after);
  }

  // Takes in every axis whose cut lies inside one that changes: what is left outside then cuts the same before and
  // after, so all data that a rank needs is among its peers.
  void try_exchange(Axes axes) {
    std::erase_if(axes, [&](int64_t axis) {
      return now_[axis].is_partial() || (now_[axis].is_replicate() && !to_[axis].is_shard());
    });
    if (axes.empty()) return;
    Placements after;
    for (bool grew = true; grew;) {
      after = exchanged(axes);
      grew = take_in(axes, after);
    }
    // Along an axis that replicates every rank has a source of its own, so only cut axes communicate.
    Axes talking = axes;
    std::erase_if(talking, [&](int64_t axis) { return !now_[axis].is_shard(); });
    if (!talking.empty()) add(Step::Kind::exchange, talking, after);
  }

  Placements exchanged(const Axes& axes) const {
    Placements after = now_;
    for (int64_t axis : axes) after[axis] = to_[axis].is_partial() ? Replicate() : to_[axis];
    return after;
  }

  bool take_in(Axes& axes, const Placements& after) const {
    for (int64_t outside = 0; outside < int64_t(now_.size()); ++outside) {
      if (!now_[outside].is_shard() || contains(axes, outside)) continue;
      const int64_t dim = now_[outside].dim();
      const bool inside = std::any_of(axes.begin(), axes.end(), [&](int64_t axis) {
        return axis < outside && (now_[axis].is_shard(dim) || after[axis].is_shard(dim));
      });
      if (!inside) continue;
      axes.insert(std::upper_bound(axes.begin(), axes.end(), outside), outside);
      return true;
    }
    return false;
  }

  double local_bytes(const Placements& placements) const {
    double parts = 1;
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      if (placements[axis].is_shard()) parts *= double(mesh_shape_[axis]);
    }
    return bytes_ / parts;
  }

  // One collective over several axes is as slow as the slowest of them.
  CostModel slowest(const Axes& axes) const {
    CostModel model = costs_[size_t(axes.front())];
    for (int64_t axis : axes) {
      const CostModel& other = costs_[size_t(axis)];
      model = {.latency = std::max(model.latency, other.latency),
               .bandwidth = std::min(model.bandwidth, other.bandwidth),
               .copy_bandwidth = std::min(model.copy_bandwidth, other.copy_bandwidth),
               .copy_latency = std::max(model.copy_latency, other.copy_latency)};
    }
    return model;
  }

  double cost(Step::Kind kind, const Axes& axes, const Placements& after) const {
    const CostModel model = slowest(axes);
    double ranks = 1;
    for (int64_t axis : axes) ranks *= double(mesh_shape_[axis]);
    const double others = (ranks - 1) / ranks;
    const auto collective = [&](double sent) { return model.latency + sent / model.bandwidth; };
    switch (kind) {
      case Step::Kind::slice:
      case Step::Kind::to_partial: return model.copy_latency + local_bytes(after) / model.copy_bandwidth;
      case Step::Kind::all_gather: return collective(local_bytes(after) * others);
      case Step::Kind::all_reduce: return collective(2 * local_bytes(now_) * others);
      case Step::Kind::reduce_scatter:
      case Step::Kind::all_to_all: return collective(local_bytes(now_) * others);
      case Step::Kind::exchange: {
        const double bytes = local_bytes(after);
        return kExchangeLatency * model.latency + bytes * others / model.bandwidth + 2 * bytes / model.copy_bandwidth;
      }
    }
    return std::numeric_limits<double>::infinity();
  }

  void add(Step::Kind kind, const Axes& axes, const Placements& after) {
    const double reached = nodes_[from_].cost + cost(kind, axes, after);
    const auto known = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.at == after; });
    Step step{kind, axes, now_[axes.front()], after[axes.front()], now_, after};
    if (known == nodes_.end()) {
      nodes_.push_back({after, reached, from_, false, std::move(step)});
    } else if (!known->done && reached < known->cost) {
      known->cost = reached;
      known->previous = from_;
      known->step = std::move(step);
    }
  }

  const Placements& to_;
  c10::IntArrayRef mesh_shape_;
  double bytes_;
  std::vector<CostModel> costs_;  // per axis
  std::vector<Node> nodes_;
  int from_ = 0;
  Placements now_;
};

std::vector<Step> cheapest_steps(c10::IntArrayRef sizes, const Placements& from, const Placements& to,
                                 c10::IntArrayRef mesh_shape, const std::vector<CostModel>& costs) {
  return Search(sizes, to, mesh_shape, costs).run(from);
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
  return cheapest_steps(sizes, start, to, mesh_shape, costs);
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
