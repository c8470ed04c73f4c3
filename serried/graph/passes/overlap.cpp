// Starts collectives as early as their operands are there, and waits as late as their results allow.
#include <algorithm>
#include <deque>

#include "serried/base/error.h"
#include "serried/graph/passes.h"
#include "serried/graph/passes/access.h"
#include "serried/graph/passes/collectives.h"
#include "serried/graph/passes/plan.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

c10::OperatorHandle serried_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("serried::" + name).c_str(), "");
}

struct Flight {
  ValueId work;
  int64_t bytes;
  Access access;
};

// A node in its new place.
struct Placed {
  Node node;
  Access access;
  int64_t bytes = -1;  // of a start
  bool is_our_wait = false;
};

class Overlapping {
 public:
  Overlapping(Graph& graph, int64_t max_bytes) : graph_(graph), accesses_(accesses_of(graph)), max_bytes_(max_bytes) {}

  std::vector<Node> run() {
    for (size_t i = 0; i < accesses_.size(); ++i) {
      const Node node = graph_.nodes()[i];
      const SimpleCollective collective = simple_collective(graph_, node);
      land(accesses_[i]);
      if (can_start(collective)) {
        start(node, collective, accesses_[i]);
      } else {
        placed_.push_back({node, accesses_[i]});
      }
    }
    for (const Flight& flight : flights_) wait_for(flight);
    return bounded();
  }

 private:
  bool can_start(const SimpleCollective& collective) const {
    if (!collective || collective.kind == SimpleCollective::Kind::all_reduce_in_place) return false;
    const TensorMeta& meta = graph_.value(collective.operand).meta;
    // Integers have no average that all backends agree on.
    return is_dense_cpu(meta) && c10::isFloatingType(meta.dtype);
  }

  void start(const Node& node, const SimpleCollective& collective, const Access& access) {
    // Whoever wrote the operand, and the collective before, stay ahead.
    size_t place = placed_.size();
    while (place > 0 && !placed_[place - 1].node.is_collective() && !in_conflict(placed_[place - 1].access, access)) {
      --place;
    }
    const ValueId work = graph_.add_value({.kind = ValueKind::work});
    Node started{serried_op("start_" + node.short_name()), {}, {{collective.result}, {work}}};
    for (const Argument& argument : node.arguments) {
      const bool is_shape = argument.kind == Argument::Kind::constant && !argument.constant.isCustomClass();
      if (!is_shape) started.arguments.push_back(argument);
    }
    placed_.insert(placed_.begin() + int64_t(place), {std::move(started), access, collective.bytes});
    flights_.push_back({work, collective.bytes, access});
  }

  // Waits for what the next node needs.
  void land(const Access& access) {
    std::erase_if(flights_, [&](const Flight& flight) {
      if (!in_conflict(flight.access, access)) return false;
      wait_for(flight);
      return true;
    });
  }

  void wait_for(const Flight& flight) {
    Access access{{}, flight.access.writes};
    access.writes.insert(access.writes.end(), flight.access.reads.begin(), flight.access.reads.end());
    placed_.push_back({.node = wait_node(flight.work), .access = std::move(access), .is_our_wait = true});
  }

  static Node wait_node(ValueId work) {
    static const c10::OperatorHandle op = serried_op("wait");
    return {op, {Argument::of_value(work)}, {}};
  }

  // Waits earlier for the oldest where too much would be on its way.
  std::vector<Node> bounded() const {
    std::vector<Node> nodes;
    std::deque<std::pair<ValueId, int64_t>> flying;
    int64_t bytes = 0;
    const auto take = [&](auto flight) {
      bytes -= flight->second;
      nodes.push_back(wait_node(flight->first));
      flying.erase(flight);
    };
    for (const Placed& placed : placed_) {
      if (placed.is_our_wait) {
        const auto is_it = [&](const auto& flight) { return flight.first == placed.node.arguments[0].ids[0]; };
        const auto found = std::find_if(flying.begin(), flying.end(), is_it);
        if (found != flying.end()) take(found);
        continue;
      }
      if (placed.bytes >= 0) {
        while (!flying.empty() && bytes + placed.bytes > max_bytes_) take(flying.begin());
        flying.emplace_back(placed.node.results[1][0], placed.bytes);
        bytes += placed.bytes;
      }
      nodes.push_back(placed.node);
    }
    return nodes;
  }

  Graph& graph_;
  const std::vector<Access> accesses_;
  const int64_t max_bytes_;
  std::vector<Placed> placed_;
  std::vector<Flight> flights_;
};

}  // namespace

Pass overlap(int64_t max_bytes_in_flight) {
  if (max_bytes_in_flight <= 0) {
    raise<c10::ValueError>({"overlap", c10::str("with ", max_bytes_in_flight, " bytes in flight nothing can overlap"),
                            "give a limit above 0, or leave the pass out"});
  }
  return {"overlap", [max_bytes_in_flight](Graph& graph) {
            graph.nodes() = Overlapping(graph, max_bytes_in_flight).run();
            plan_again(graph);
          }};
}

}  // namespace serried::passes
