// The loop, and what can be decided before it.
#include "serried/graph/replay/program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "serried/base/error.h"

namespace serried::graph {
namespace {

using c10::IValue;

constexpr c10::DispatchKeySet kCpuKernel(c10::DispatchKey::CPU);

// The memory that a graph's buffers share.
class Arena {
 public:
  explicit Arena(int64_t num_bytes) : bytes_(at::empty({num_bytes}, at::kByte)) {}

  /// A tensor of its own (no autograd view) on the arena's memory, which it keeps alive.
  at::Tensor tensor_at(int64_t byte_offset, const TensorMeta& meta) const {
    at::Tensor t = at::empty({0}, at::TensorOptions(meta.dtype));
    const int64_t item = int64_t(c10::elementSize(meta.dtype));
    return t.set_(bytes_.storage(), byte_offset / item + meta.offset, meta.sizes, meta.strides);
  }

 private:
  at::Tensor bytes_;
};

bool is_plain(const Value& value) {
  return value.kind == ValueKind::work || is_dense_cpu(value.meta);
}

bool is_list(Argument::Kind kind) {
  return kind == Argument::Kind::values || kind == Argument::Kind::optional_values ||
         kind == Argument::Kind::nested_values;
}

bool goes_to_kernel(const Graph& graph, const Node& node) {
  bool dense = true;
  for_each_operand(node, [&](ValueId id) { dense &= is_plain(graph.value(id)); });
  for_each_result(node, [&](ValueId id) { dense &= is_plain(graph.value(id)); });
  return dense;
}

}  // namespace

Program::Program(const Graph& graph, const std::vector<Group>& groups, std::vector<WeakGenerator> generators)
    : values_(graph.values().size()),
      is_fixed_(graph.values().size()),
      inputs_(graph.inputs()),
      generators_(std::move(generators)) {
  for (const Group& group : groups) groups_.emplace_back(group);
  const Arena arena(graph.arena_bytes());
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    is_fixed_[id] = value.tensor.defined() || value.kind == ValueKind::buffer;
    if (value.tensor.defined()) values_[id] = value.tensor;
    if (value.kind == ValueKind::buffer) values_[id] = arena.tensor_at(value.arena_offset, value.meta);
  }
  for (const Node& node : graph.nodes()) {
    Step step{node.op, goes_to_kernel(graph, node), {}, node.results};
    for (const Argument& argument : node.arguments) step.operands.push_back(operand_of(graph, argument, groups));
    steps_.push_back(std::move(step));
  }
  mark_last_uses(graph);
  note_changing();
}

Program::Operand Program::operand_of(const Graph& graph, const Argument& argument,
                                     const std::vector<Group>& groups) const {
  Operand operand{.kind = argument.kind, .constant = argument.constant, .ids = argument.ids};
  if (argument.kind == Argument::Kind::value) {
    operand.id = argument.ids[0];
    if (operand.id == kNoValue) {
      operand.kind = Argument::Kind::constant;
      operand.constant = at::Tensor();
    } else if (is_fixed_[operand.id]) {
      operand.kind = Argument::Kind::constant;
      operand.constant = values_[operand.id];
    }
  }
  if (is_list(argument.kind) && std::all_of(argument.ids.begin(), argument.ids.end(),
                                            [&](ValueId id) { return id == kNoValue || is_fixed_[id]; })) {
    operand.constant = list_of(operand);
    operand.kind = Argument::Kind::constant;
  }
  if (argument.kind == Argument::Kind::generator) operand.group = int(argument.constant.toInt());
  if (argument.kind != Argument::Kind::group) return operand;
  const std::string& name = argument.constant.toStringRef();
  const auto found =
      std::find_if(groups.begin(), groups.end(), [&](const Group& group) { return group->getGroupName() == name; });
  if (found == groups.end()) {
    raise<c10::ValueError>({"graph", c10::str("there is no group \"", name, "\" here"),
                            "give the program the groups that its collectives name"});
  }
  operand.group = int(found - groups.begin());
  return operand;
}

// A value moves into its last use, so that its memory is free as early as in eager.
void Program::mark_last_uses(const Graph& graph) {
  std::vector<bool> is_needed = graph.escaping();
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    for (auto& ids : step->results) {
      for (ValueId& id : ids) {
        if (id != kNoValue && (!is_needed[id] || is_fixed_[id])) id = kNoValue;
      }
    }
    for (auto operand = step->operands.rbegin(); operand != step->operands.rend(); ++operand) {
      if (operand->kind == Argument::Kind::value) {
        operand->is_last_use = !is_needed[operand->id];
        is_needed[operand->id] = true;
      }
      if (!is_list(operand->kind)) continue;
      for (ValueId id : operand->ids) {
        if (id == kNoValue || is_needed[id]) continue;
        is_needed[id] = true;
        if (!is_fixed_[id]) step->frees.push_back(id);
      }
    }
  }
}

void Program::note_changing() {
  for (ValueId id : inputs_) {
    if (id != kNoValue) changing_.push_back(id);
  }
  for (const Step& step : steps_) {
    for (const auto& ids : step.results) {
      std::copy_if(ids.begin(), ids.end(), std::back_inserter(changing_), [](ValueId id) { return id != kNoValue; });
    }
  }
}

void Program::bind(const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i] != kNoValue) values_[inputs_[i]] = inputs[i];
  }
  live_groups_.clear();
  for (const auto& group : groups_) live_groups_.emplace_back(group.lock());
  live_generators_.clear();
  for (const WeakGenerator& generator : generators_) live_generators_.emplace_back(at::Generator(generator.lock()));
}

void Program::run(const std::vector<at::Tensor>& inputs) {
  // The grad mode stays as it was when the function was recorded: some kernels keep more for backward where it is on.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Autocast did its part when the graph was recorded: its casts are nodes.
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  try {
    bind(inputs);
    for (Step& step : steps_) execute(step);
  } catch (...) {
    land();
    clear();
    throw;
  }
}

// What is still on its way reads and writes memory that the next run uses.
void Program::land() noexcept {
  for (ValueId id : changing_) {
    if (!values_[id].isCustomClass()) continue;
    try {
      values_[id].toCustomClass<c10d::Work>()->wait();
    } catch (const std::exception&) {
      // The run that failed has raised already.
    }
  }
}

void Program::clear() {
  stack_.clear();
  live_groups_.clear();
  live_generators_.clear();
  for (ValueId id : changing_) values_[id] = IValue();
}

void Program::push(Operand& operand) {
  switch (operand.kind) {
    case Argument::Kind::constant: stack_.push_back(operand.constant); return;
    case Argument::Kind::group: stack_.push_back(live_groups_[operand.group]); return;
    case Argument::Kind::generator: stack_.push_back(live_generators_.at(operand.group)); return;
    case Argument::Kind::value:
      if (operand.is_last_use) {
        stack_.push_back(std::move(values_[operand.id]));
        values_[operand.id] = IValue();
      } else {
        stack_.push_back(values_[operand.id]);
      }
      return;
    default: stack_.push_back(list_of(operand));
  }
}

IValue Program::list_of(const Operand& operand) const {
  const auto tensor = [&](ValueId id) { return id == kNoValue ? at::Tensor() : values_[id].toTensor(); };
  if (operand.kind == Argument::Kind::values) {
    c10::List<at::Tensor> list;
    list.reserve(operand.ids.size());
    for (ValueId id : operand.ids) list.push_back(tensor(id));
    return list;
  }
  if (operand.kind == Argument::Kind::optional_values) {
    c10::List<std::optional<at::Tensor>> list;
    for (ValueId id : operand.ids) list.push_back(id == kNoValue ? std::nullopt : std::optional(tensor(id)));
    return list;
  }
  c10::List<c10::List<at::Tensor>> lists;
  size_t next = 0;
  for (const IValue& length : operand.constant.toListRef()) {
    c10::List<at::Tensor> list;
    for (int64_t k = 0; k < length.toInt(); ++k) list.push_back(tensor(operand.ids[next++]));
    lists.push_back(std::move(list));
  }
  return lists;
}

void Program::execute(Step& step) {
  stack_.clear();
  for (Operand& operand : step.operands) push(operand);
  if (step.goes_to_kernel) {
    step.op.redispatchBoxed(kCpuKernel, &stack_);
  } else {
    step.op.callBoxed(stack_);
  }
  keep_results(step);
  for (ValueId id : step.frees) values_[id] = IValue();
}

void Program::keep_results(const Step& step) {
  for (size_t r = 0; r < step.results.size(); ++r) {
    const std::vector<ValueId>& ids = step.results[r];
    if (stack_[r].isTensorList()) {
      const std::vector<at::Tensor> tensors = stack_[r].toTensorVector();
      for (size_t k = 0; k < ids.size(); ++k) {
        if (ids[k] != kNoValue) values_[ids[k]] = tensors[k];
      }
    } else if (!ids.empty() && ids[0] != kNoValue) {
      values_[ids[0]] = std::move(stack_[r]);
    }
  }
}

}  // namespace serried::graph
