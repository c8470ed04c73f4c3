// Starts collectives as early as their operands are there, and waits as late as their results allow.
#include <algorithm>
#include <deque>
#include <optional>

#include "serried/base/error.h"
#include "serried/graph/passes/access.h"
#include "serried/graph/passes/collectives.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/passes/plan_memory.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

struct Flight {
  ValueId work;
  int64_t bytes;
  Access access;
};

// The op that starts it; none where there is no such op.
std::optional<c10::OperatorHandle> start_of(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  if (!name.starts_with("serried::")) return std::nullopt;
  return c10::Dispatcher::singleton().findSchema({"serried::start_" + name.substr(9), ""});
}

bool can_start(const Graph& graph, const Node& node) {
  if (!start_of(node) || is_premultiplied(node)) return false;
  bool fits = true;
  const auto check = [&](ValueId id) { fits &= is_dense_cpu(graph.value(id).meta); };
  for_each_operand(node, check);
  for_each_result(node, check);
  return fits;
}

int64_t largest_bytes(const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  const auto count = [&](ValueId id) { bytes = std::max(bytes, graph.value(id).meta.num_bytes()); };
  for_each_operand(node, count);
  for_each_result(node, count);
  return bytes;
}

// A node in its new place.
struct Placed {
  Node node;
  Access access;
  int64_t bytes = -1;  // of a start
  bool is_our_wait = false;
};

class Overlapping {
 public:
  Overlapping(Graph& graph, int64_t max_bytes)
      : graph_(graph), accesses_(accesses_of_parts(graph)), max_bytes_(max_bytes) {}

  std::vector<Node> run() {
    for (size_t i = 0; i < accesses_.size(); ++i) {
      const Node node = graph_.nodes()[i];
      // A view does not look at the data.
      if (!is_alias(graph_, node)) land(accesses_[i]);
      if (can_start(graph_, node)) {
        start(node, accesses_[i]);
      } else {
        placed_.push_back({node, accesses_[i]});
      }
    }
    for (const Flight& flight : flights_) wait_for(flight);
    return bounded();
  }

 private:
  void start(const Node& node, const Access& access) {
    size_t place = placed_.size();
    while (place > 0 && !stays_ahead(placed_[place - 1], node, access)) --place;
    const ValueId work = graph_.add_value({.kind = ValueKind::work});
    Node started{*start_of(node), {}, node.results, node.phase};
    started.results.push_back({work});
    for (const c10::Argument& wanted : started.op.schema().arguments()) {
      started.arguments.push_back(node.arguments[size_t(*node.op.schema().argumentIndexWithName(wanted.name()))]);
    }
    const int64_t bytes = largest_bytes(graph_, node);
    placed_.insert(placed_.begin() + int64_t(place), {std::move(started), access, bytes});
    flights_.push_back({work, bytes, access});
  }

  // Whoever wrote or made the operand, and the collective before.
  static bool stays_ahead(const Placed& placed, const Node& node, const Access& access) {
    if (placed.node.is_collective() || in_conflict(placed.access, access)) return true;
    bool makes_operand = false;
    for_each_result(placed.node, [&](ValueId made) {
      for_each_operand(node, [&](ValueId used) { makes_operand |= made == used; });
    });
    return makes_operand;
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
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::wait", "");
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
        flying.emplace_back(placed.node.results.back()[0], placed.bytes);
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
            join_starts_and_waits(graph, [&](const Node& ours) { return can_start(graph, ours); });
            graph.nodes() = Overlapping(graph, max_bytes_in_flight).run();
            plan_again(graph);
          }};
}

}  // namespace serried::passes
