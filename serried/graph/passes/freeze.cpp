// Lets ops write into memory that stays, by their out= forms, instead of allocating at each run.
#include <ATen/ScalarOps.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "serried/base/error.h"
#include "serried/graph/passes/access.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/passes/plan_memory.h"

namespace serried::passes {
namespace {

using namespace serried::graph;
using c10::OperatorHandle;

bool is_out_form(const c10::FunctionSchema& plain, const c10::FunctionSchema& candidate) {
  const size_t num_arguments = plain.arguments().size(), num_results = plain.returns().size();
  if (candidate.arguments().size() != num_arguments + num_results) return false;
  if (candidate.returns().size() != num_results) return false;
  for (size_t i = 0; i < num_arguments; ++i) {
    if (*candidate.arguments()[i].type() != *plain.arguments()[i].type()) return false;
    if (candidate.arguments()[i].name() != plain.arguments()[i].name() || is_written(candidate, i)) return false;
  }
  for (size_t i = num_arguments; i < candidate.arguments().size(); ++i) {
    if (!is_written(candidate, i)) return false;
  }
  return true;
}

// Those that are written for the CPU: the generated ones allocate inside and copy.
std::optional<OperatorHandle> find_out_form(const OperatorHandle& op) {
  static const auto overloads = [] {
    std::unordered_multimap<std::string, c10::OperatorName> all;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.starts_with("aten::") && !name.overload_name.empty()) all.emplace(name.name, name);
    }
    return all;
  }();
  const auto [begin, end] = overloads.equal_range(op.operator_name().name);
  for (auto candidate = begin; candidate != end; ++candidate) {
    const auto handle = c10::Dispatcher::singleton().findSchema(candidate->second);
    if (handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        is_out_form(op.schema(), handle->schema())) {
      return handle;
    }
  }
  return std::nullopt;
}

// Losses resize the tensor they are given to the shape before the reduction.
bool resizes_output(const OperatorHandle& op) {
  if (op.operator_name().name.ends_with("_backward")) return false;
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.name() == "reduction"; });
}

bool is_whole_storage(const TensorMeta& meta) {
  return meta.offset == 0 && is_dense_cpu(meta) && meta.num_bytes() > 0 && meta.storage_end() == meta.num_bytes();
}

// Each result has memory of its own that nobody sees after the run.
bool can_stay(const Graph& graph, const Node& node, const Storages& storages, const std::vector<bool>& is_known) {
  bool fits = true;
  for (const auto& ids : node.results) fits &= ids.size() == 1 && ids[0] != kNoValue;
  for_each_result(node, [&](ValueId id) {
    const Value& value = graph.value(id);
    fits &= value.kind == ValueKind::computed && is_whole_storage(value.meta) && !storages.escapes(id) &&
            !storages.changes_layout(id) && !is_known[size_t(value.storage)];
  });
  for_each_operand(node, [&](ValueId id) { fits &= is_dense_cpu(graph.value(id).meta); });
  return fits;
}

OperatorHandle op_named(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

bool is_relu(const Node& node) {
  return node.op.operator_name().name == "aten::relu";
}

// relu is clamp_min(x, 0) inside, and ops with a number turn it into a 0-dim tensor that yields to the type of the
// other operand, if that has a dim; neither has an out= form of its own.
OperatorHandle spelled_out(const Graph& graph, const Node& node) {
  static const OperatorHandle clamp_min = op_named("aten::clamp_min", ""), add = op_named("aten::add", "Tensor"),
                              sub = op_named("aten::sub", "Tensor"), mul = op_named("aten::mul", "Tensor"),
                              div = op_named("aten::div", "Tensor");
  static const std::unordered_map<std::string, OperatorHandle> on_tensors = {
      {"aten::add.Scalar", add}, {"aten::sub.Scalar", sub}, {"aten::mul.Scalar", mul}, {"aten::div.Scalar", div}};
  if (is_relu(node)) return clamp_min;
  const auto found = on_tensors.find(c10::toString(node.op.operator_name()));
  const bool is_number = found == on_tensors.end() || graph.value(node.arguments[0].ids[0]).meta.sizes.empty();
  return is_number ? node.op : found->second;
}

void spell_out(Graph& graph, Node& node) {
  if (is_relu(node)) {
    node.arguments.push_back(Argument::of(int64_t(0)));
    return;
  }
  const at::Tensor number = at::native::wrapped_scalar_tensor(node.arguments[1].constant.toScalar());
  node.arguments[1] = Argument::of_value(graph.add_value(
      {.kind = ValueKind::constant, .meta = meta_of(number), .tensor = number, .storage = new_storage(graph)}));
}

/// How long a storage is needed.
struct Lifetime {
  int64_t bytes = 0;
  size_t first = SIZE_MAX, last = 0;  // nodes
  bool is_fixed = false;              // lives in the arena
};

/// Per storage that the run makes; others have no bytes.
std::vector<Lifetime> lifetimes_of(const Graph& graph) {
  std::vector<Lifetime> lifetimes(size_t(new_storage(graph)));
  for (const Value& value : graph.values()) {
    if (value.kind != ValueKind::computed || value.storage < 0) continue;
    int64_t& bytes = lifetimes[size_t(value.storage)].bytes;
    bytes = std::max(bytes, value.meta.num_bytes());
  }
  const std::vector<Access> accesses = accesses_of(graph);
  for (size_t i = 0; i < accesses.size(); ++i) {
    for (const auto* storages : {&accesses[i].reads, &accesses[i].writes}) {
      for (int32_t storage : *storages) {
        Lifetime& lifetime = lifetimes[size_t(storage)];
        lifetime.first = std::min(lifetime.first, i);
        lifetime.last = std::max(lifetime.last, i);
      }
    }
  }
  const Storages storages(graph);
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    if (value.storage < 0) continue;
    Lifetime& lifetime = lifetimes[size_t(value.storage)];
    if (value.kind == ValueKind::persistent || value.kind == ValueKind::input || value.kind == ValueKind::constant) {
      lifetime.bytes = 0;
    } else if (storages.escapes(ValueId(id))) {
      lifetime.last = accesses.size();
    }
  }
  return lifetimes;
}

// The most that lifetimes of one kind need together.
int64_t peak_of(const std::vector<Lifetime>& lifetimes, size_t num_nodes, bool is_fixed) {
  std::vector<int64_t> change(num_nodes + 2);
  for (const Lifetime& lifetime : lifetimes) {
    if (lifetime.is_fixed != is_fixed || lifetime.bytes == 0 || lifetime.first == SIZE_MAX) continue;
    change[lifetime.first] += lifetime.bytes;
    change[lifetime.last + 1] -= lifetime.bytes;
  }
  int64_t now = 0, most = 0;
  for (int64_t bytes : change) most = std::max(most, now += bytes);
  return most;
}

int64_t bytes_of(const std::vector<Lifetime>& lifetimes, const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  for_each_result(node, [&](ValueId id) { bytes += lifetimes[size_t(graph.value(id).storage)].bytes; });
  return bytes;
}

// Memory that stays is held during the whole run, also when others need theirs. Per node of `candidates` whether its
// results may stay without the run needing more than `max_peak` times what one needs that frees everything after its
// last use, as eager does. Small results are preferred: they cost most time per byte to allocate.
std::vector<bool> fits_in_peak(const Graph& graph, const std::vector<size_t>& candidates, double max_peak) {
  std::vector<Lifetime> lifetimes = lifetimes_of(graph);
  const size_t num_nodes = graph.nodes().size();
  const double limit = max_peak * double(peak_of(lifetimes, num_nodes, /*is_fixed=*/false));
  std::vector<size_t> by_size(candidates.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return bytes_of(lifetimes, graph, graph.nodes()[candidates[a]]) <
           bytes_of(lifetimes, graph, graph.nodes()[candidates[b]]);
  });
  const auto set_fixed = [&](size_t k, bool is_fixed) {
    for_each_result(graph.nodes()[candidates[by_size[k]]],
                    [&](ValueId id) { lifetimes[size_t(graph.value(id).storage)].is_fixed = is_fixed; });
  };
  // The longest run of smallest ones that fits, found by halving.
  size_t fits = 0, too_many = candidates.size() + 1, fixed = 0;
  while (fits + 1 < too_many) {
    const size_t middle = (fits + too_many) / 2;
    for (; fixed < middle; ++fixed) set_fixed(fixed, true);
    for (; fixed > middle; --fixed) set_fixed(fixed - 1, false);
    const bool in_limit = double(peak_of(lifetimes, num_nodes, true) + peak_of(lifetimes, num_nodes, false)) <= limit;
    (in_limit ? fits : too_many) = middle;
  }
  std::vector<bool> may_stay(candidates.size());
  for (size_t k = 0; k < fits; ++k) may_stay[by_size[k]] = true;
  return may_stay;
}

void freeze_node(Graph& graph, Node& node, const OperatorHandle& out_form) {
  node.op = out_form;
  for (const auto& ids : node.results) {
    Value& value = graph.value(ids[0]);
    value.kind = ValueKind::buffer;
    value.arena_offset = add_to_arena(graph, value.meta.num_bytes());
    node.arguments.push_back(Argument::of_value(ids[0]));
  }
}

struct Candidate {
  size_t node;
  OperatorHandle out_form;
};

std::vector<Candidate> candidates_in(const Graph& graph) {
  const Storages storages(graph);
  std::vector<bool> is_known(size_t(new_storage(graph)));  // storages that an earlier node has touched
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    const Node& node = graph.nodes()[i];
    const bool may_stay = can_stay(graph, node, storages, is_known);
    for_each_result(node, [&](ValueId id) {
      if (graph.value(id).storage >= 0) is_known[size_t(graph.value(id).storage)] = true;
    });
    if (!may_stay || has_effects(node) || !is_functional(node.op.schema()) || resizes_output(node.op)) continue;
    if (const auto out_form = find_out_form(spelled_out(graph, node))) candidates.push_back({i, *out_form});
  }
  return candidates;
}

void run_freeze(Graph& graph, double max_peak) {
  const std::vector<Candidate> candidates = candidates_in(graph);
  std::vector<size_t> indices;
  for (const Candidate& candidate : candidates) indices.push_back(candidate.node);
  const std::vector<bool> fits = fits_in_peak(graph, indices, max_peak);
  for (size_t k = 0; k < candidates.size(); ++k) {
    if (!fits[k]) continue;
    Node& node = graph.nodes()[candidates[k].node];
    if (!(spelled_out(graph, node) == node.op)) spell_out(graph, node);
    freeze_node(graph, node, candidates[k].out_form);
  }
}

}  // namespace

Pass freeze(double max_peak) {
  if (!(max_peak >= 1)) {
    raise<c10::ValueError>({"freeze", c10::str("max_peak is ", max_peak), "pass 1 or more: 1 is the memory of eager"});
  }
  return {"freeze", [max_peak](Graph& graph) { run_freeze(graph, max_peak); }};
}

}  // namespace serried::passes
