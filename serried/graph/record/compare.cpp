// Compares two recordings of one function.
#include "serried/graph/record/compare.h"

#include <ATen/core/Generator.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "serried/graph/error.h"
#include "serried/graph/text/custom_class.h"
#include "serried/graph/text/text.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

using c10::IValue;

// Bit for bit, so that NaN equals itself.
bool same_double(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

bool same_constant(const IValue& a, const IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isDouble()) return same_double(a.toDouble(), b.toDouble());
  if (a.isList()) {
    const auto x = a.toListRef(), y = b.toListRef();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same_constant);
  }
  if (reduce_op_of(a) != nullptr && reduce_op_of(b) != nullptr) return constant_text(a) == constant_text(b);
  if (a.isGenerator()) return a.toGenerator() == b.toGenerator();
  if (a.isPtrType() && a.is(b)) return true;
  if (a.isCustomClass() || a.isStorage()) return a.is(b);
  return a == b;
}

bool same_operands(const Argument& a, const Argument& b) {
  return a.kind == b.kind && a.ids == b.ids;
}

// Adam and its kin, RMSprop, Adagrad: all divide by a root of squares.
bool is_stock_optimizer(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  return name == "aten::addcdiv_" || name == "aten::addcdiv";
}

std::vector<std::string> hints_for(const Node& node, bool was_read) {
  std::vector<std::string> hints;
  if (was_read) hints.push_back("keep the value in a tensor: no item() between the ops that use it");
  if (is_stock_optimizer(node)) {
    hints.push_back(
        "torch::optim bakes step count and learning rate into scalars: instead of its Adam and AdamW use "
        "serried::AdamW "
        "or serried::Adam, which keep both in tensors; of others keep the rate fixed (Adagrad: lr_decay = 0)");
  }
  hints.push_back("pass the number as a 0-dim tensor that the function reads");
  return hints;
}

// The first argument of node `i` whose constant changed.
std::optional<size_t> changed_argument(const Recording& first, const Recording& second, size_t i) {
  const Node &a = first.graph.nodes()[i], &b = second.graph.nodes()[i];
  for (size_t k = 0; k < a.arguments.size(); ++k) {
    if (!same_constant(a.arguments[k].constant, b.arguments[k].constant)) return k;
  }
  return std::nullopt;
}

// Not equal() and its kin, which modules of torch::nn call too: a yes or no is no number that differs.
bool gives_number(const HostRead& read) {
  return read.op == "aten::_local_scalar_dense";
}

[[noreturn]] void raise_changed(const Recording& first, const Recording& second, size_t i, size_t k) {
  const Node& node = second.graph.nodes()[i];
  const HostRead* read = nullptr;
  for (const HostRead& candidate : second.host_reads) {
    if (candidate.before_node <= i && gives_number(candidate)) read = &candidate;
  }
  const std::string op = c10::toString(node.op.operator_name());
  throw CaptureError(
      {read != nullptr ? CaptureErrorKind::host_read : CaptureErrorKind::changing_scalar,
       read != nullptr ? read->op : op, line_of(second.graph, i),
       c10::str("argument \"", node.op.schema().arguments()[k].name(), "\" of ", op, " was ",
                constant_text(first.graph.nodes()[i].arguments[k].constant), " in one call and ",
                constant_text(node.arguments[k].constant), " in the next; a replay would repeat the last one"),
       hints_for(node, read != nullptr)});
}

void check_generators(const Recording& first, const Recording& second) {
  for (size_t i = 0; i < std::min(first.generators.size(), second.generators.size()); ++i) {
    if (first.generators[i]._unsafe_get_target() == second.generators[i]._unsafe_get_target()) continue;
    throw CaptureError({CaptureErrorKind::changing_scalar,
                        "",
                        "",
                        "a generator that the function draws from is another one in each call; a replay would draw "
                        "from the last one",
                        {"keep one generator, and seed it before the call of the captured function"}});
  }
}

void check_constants(const Recording& first, const Recording& second) {
  const std::vector<Node>& nodes = second.graph.nodes();
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto changed = changed_argument(first, second, i);
    if (!changed) continue;
    // The op of an optimizer that follows says more about the cause.
    const size_t update =
        size_t(std::find_if(nodes.begin() + int64_t(i), nodes.end(), is_stock_optimizer) - nodes.begin());
    const auto changed_there = update < nodes.size() ? changed_argument(first, second, update) : std::nullopt;
    if (changed_there) raise_changed(first, second, update, *changed_there);
    raise_changed(first, second, i, *changed);
  }
}

bool same_data(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.layout() != at::kStrided || !a.device().is_cpu()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// Names the op that uses the value first, and what is wrong with the value.
[[noreturn]] void raise_for(const Recording& recording, ValueId id, const std::string& what,
                            std::vector<std::string> hints, CaptureErrorKind kind = CaptureErrorKind::off_tape_tensor) {
  const std::vector<size_t> uses = recording.graph.uses(id);
  const std::string op = uses.empty() ? "" : c10::toString(recording.graph.nodes()[uses[0]].op.operator_name());
  throw CaptureError({kind, op, uses.empty() ? "" : line_of(recording.graph, uses[0]),
                      c10::str("the tensor ", recording.graph.value(id).meta.to_string(), " that ",
                               op.empty() ? "the function" : op, " uses ", what),
                      std::move(hints)});
}

const std::string kPassIt = "pass it to the captured function as an argument";
const std::string kKeepIt = "keep one tensor, and copy_ into it";

// As Module::zero_grad() does with gradients.
bool is_detached_first(const Graph& graph, ValueId id) {
  const std::vector<size_t> uses = graph.uses(id);
  return !uses.empty() && graph.nodes()[uses[0]].op.operator_name().name == "aten::detach";
}

[[noreturn]] void raise_off_tape(const Recording& second, ValueId id, const at::Tensor& before, const at::Tensor& now,
                                 std::vector<std::string> hints = {}) {
  const bool is_number = before.numel() == 1 && now.numel() == 1 && before.layout() == at::kStrided;
  const std::string values = is_number ? c10::str(": it was ", before.item().toDouble(), " in one call and ",
                                                  now.item().toDouble(), " in the next")
                                       : ": its data differs from call to call";
  const bool was_read = std::any_of(second.host_reads.begin(), second.host_reads.end(), gives_number);
  hints.insert(hints.end(), {kPassIt, "fill a tensor that lives longer than the call, with copy_ or fill_"});
  raise_for(second, id, "was made without an op (from numbers on the host, or outside of the function)" + values,
            std::move(hints), was_read && is_number ? CaptureErrorKind::host_read : CaptureErrorKind::off_tape_tensor);
}

// Two recordings met different tensors in this place: say why that one cannot be replayed.
[[noreturn]] void raise_made_anew(const Recording& second, ValueId id, const at::Tensor& before,
                                  const at::Tensor& now) {
  if (!is_allocated(*storage_of(before)) || !is_allocated(*storage_of(now))) {
    raise_for(second, id, "lies in memory that torch does not own (from_blob) and is another one in each call",
              {kPassIt, "make it of the numbers: torch::tensor(vector)"});
  }
  std::vector<std::string> hints;
  if (is_detached_first(second.graph, id)) {
    hints = {"clear gradients by optimizer.zero_grad(): that of a module looks at them before it does"};
  }
  if (!same_data(before, now)) raise_off_tape(second, id, before, now, std::move(hints));
  hints.insert(hints.end(), {kPassIt, kKeepIt});
  raise_for(second, id,
            "is another one in each call, made without an op or outside of the function: equal in two of them, which "
            "says nothing of the next",
            std::move(hints));
}

void check_layout(const Recording& first, const Recording& second, ValueId id) {
  const TensorMeta &before = first.graph.value(id).meta, &now = second.graph.value(id).meta;
  if (before == now) return;
  const auto text = [&](const TensorMeta& meta) {
    const std::string shape = before.to_string() == now.to_string() ? "" : meta.to_string() + ", ";
    return c10::str(shape, "strides ", c10::IntArrayRef(meta.strides), " from element ", meta.offset, " on");
  };
  raise_for(second, id,
            c10::str("is another part of one memory in each call: first ", text(before), ", then ", text(now)),
            {kPassIt, kKeepIt});
}

// Guards look at outer tensors. One of them, or its gradient, has to be the tensor behind the value: else no guard
// would notice when another tensor takes its place.
void check_holder(const Recording& recording, ValueId id) {
  const auto is_first = [id](const OuterTensor& outer) { return outer.value == id; };
  const auto first = std::find_if(recording.outer_tensors.begin(), recording.outer_tensors.end(), is_first);
  if (first == recording.outer_tensors.end()) return;
  for (const OuterTensor& outer : recording.outer_tensors) {
    const at::Tensor t = part_of(outer.tensor.lock());
    if (!t.defined()) continue;
    if (first->place.holds(t)) return;
    const at::Tensor grad = t.requires_grad() && t.is_leaf() ? part_of(t.grad()) : at::Tensor();
    if (grad.defined() && first->place.holds(grad)) return;
  }
  raise_for(recording, id,
            "is seen through copies of its handle only (.data()): another one in its place would not show",
            {"use detach(), or NoGradGuard, instead of .data()", kPassIt});
}

bool is_made_by_hand(const Recording& recording, ValueId id) {
  return recording.graph.value(id).kind == ValueKind::constant;
}

// x * 2 and its kin.
bool is_wrapped_number(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->is_wrapped_number();
}

// Of external value `i`: a constant if it was made by hand, the same each time; else it has to be one that stays.
void decide_kind(const Recording& first, Recording& second, size_t i) {
  const ValueId id = second.externals[i];
  Value& value = second.graph.value(id);
  const at::Tensor& before = first.graph.value(first.externals[i]).tensor;
  if (is_made_by_hand(second, id) || (is_wrapped_number(before) && is_wrapped_number(value.tensor))) {
    if (!same_data(before, value.tensor)) raise_off_tape(second, id, before, value.tensor);
    value.kind = ValueKind::constant;
    value.tensor = value.tensor.detach();
    return;
  }
  if (storage_of(before) != storage_of(value.tensor)) raise_made_anew(second, id, before, value.tensor);
  check_layout(first, second, id);
  check_holder(second, id);
}

// Views that no op made: of a tensor that stays they stay too, of an argument the next call may have others.
void check_views(const Recording& first, const Recording& second) {
  for (ValueId id : second.views) {
    const int32_t storage = second.graph.value(id).storage;
    for (size_t i = 0; i < second.graph.inputs().size(); ++i) {
      const ValueId input = second.graph.inputs()[i];
      if (input == kNoValue || second.graph.value(input).storage != storage || !second.inputs[i].any_storage) continue;
      raise_for(second, id,
                c10::str("shares memory with input ", i, ", ", second.graph.value(input).meta.to_string(),
                         ", and was made outside of the function"),
                {"make the view inside of the captured function", "pass it to the function as an argument too"});
    }
    check_layout(first, second, id);
    check_holder(second, id);
  }
}

// Those that ops write, and those that the caller gets and may write.
std::set<int32_t> written_storages(const Graph& graph) {
  std::set<int32_t> written;
  const auto add = [&](ValueId id) { written.insert(graph.value(id).storage); };
  for (const Node& node : graph.nodes()) for_each_written(node, add);
  for (ValueId id : graph.outputs()) {
    if (id != kNoValue) add(id);
  }
  for (const Gradient& gradient : graph.gradients()) {
    if (gradient.value != kNoValue) add(gradient.value);
  }
  return written;
}

// A constant that somebody writes starts anew at each call.
void copy_written_constants(Graph& graph) {
  static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
  const std::set<int32_t> written = written_storages(graph);
  std::vector<Node> copies;
  for (size_t id = 0; id < graph.values().size(); ++id) {
    Value& value = graph.value(ValueId(id));
    if (value.kind != ValueKind::constant || written.count(value.storage) == 0) continue;
    Value original = value;
    original.storage = -1;
    value.kind = ValueKind::computed;
    value.tensor.reset();
    const ValueId from = graph.add_value(std::move(original));
    copies.push_back({clone, {Argument::of_value(from), Argument::of(IValue())}, {{ValueId(id)}}});
  }
  graph.nodes().insert(graph.nodes().begin(), copies.begin(), copies.end());
}

// empty() or zeros() whose memory was filled by hand: the constant stands in its place.
void drop_makers_of_constants(Graph& graph) {
  std::erase_if(graph.nodes(), [&](const Node& node) {
    if (!is_functional(node.op.schema()) || node.results.size() != 1 || node.results[0].size() != 1) return false;
    const ValueId id = node.results[0][0];
    return id != kNoValue && graph.value(id).kind == ValueKind::constant;
  });
}

bool found_by_itself(const Recording& recording, const c10::StorageImpl* storage) {
  return std::any_of(recording.externals.begin(), recording.externals.end(), [&](ValueId id) {
    const Value& value = recording.graph.value(id);
    return storage != nullptr && is_from_outside(value) && overlap(*storage, *storage_of(value.tensor));
  });
}

bool has_inputs_found_in(const Recording& recording, const Recording& other) {
  return std::any_of(recording.inputs.begin(), recording.inputs.end(), [&](const InputPlace& input) {
    const auto storage = input.storage.lock();
    return found_by_itself(other, storage.get());
  });
}

// Whether the surroundings have a tensor in the memory of an input: they may move together.
bool is_held_outside(const Recording& recording, const InputPlace& input) {
  return std::any_of(recording.outer_tensors.begin(), recording.outer_tensors.end(), [&](const OuterTensor& outer) {
    return outer.is_of_surroundings() && outer.is_lasting && input.was_defined &&
           outer.place.storage == input.storage._unsafe_get_target();
  });
}

// Notes in `second.inputs` what differed between two recordings that agree. A function that finds one of its arguments
// by itself too looks as if it used the argument twice: so an input counts as one that may change only if it did.
void compare_inputs(const Recording& first, Recording& second) {
  for (size_t i = 0; i < second.inputs.size(); ++i) {
    const InputPlace& before = first.inputs[i];
    InputPlace& now = second.inputs[i];
    const bool is_other = before.part.address() != now.part.address();
    const bool moved = is_other && before.storage._unsafe_get_target() != now.storage._unsafe_get_target();
    now.any_storage = (before.any_storage || moved) && !is_held_outside(second, now);
    now.any_offset = before.any_offset || moved || (is_other && before.offset != now.offset);
    now.any_tensor = before.any_tensor || is_other;
  }
}

}  // namespace

std::string first_difference(const Recording& first, const Recording& second) {
  const auto &a = first.graph.nodes(), &b = second.graph.nodes();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!(a[i].op == b[i].op) || !std::equal(a[i].arguments.begin(), a[i].arguments.end(), b[i].arguments.begin(),
                                             b[i].arguments.end(), same_operands)) {
      return c10::str("line ", i, " was \"", line_of(first.graph, i), "\" and then \"", line_of(second.graph, i), "\"");
    }
  }
  if (a.size() != b.size()) return c10::str(a.size(), " ops ran in one call and ", b.size(), " in the next");
  if (first.graph.inputs() != second.graph.inputs()) return "it adds to the gradients of other parameters";
  if (first.externals != second.externals || first.views != second.views)
    return "the tensors from outside are used in another order";
  return "";
}

void make_replayable(const Recording& first, Recording& second) {
  compare_inputs(first, second);
  check_views(first, second);
  check_generators(first, second);
  check_constants(first, second);
  for (size_t i = 0; i < second.externals.size(); ++i) decide_kind(first, second, i);
  drop_makers_of_constants(second.graph);
  copy_written_constants(second.graph);
}

bool is_from_outside(const Value& value) {
  return value.kind == ValueKind::persistent && value.tensor.defined() && value.tensor.has_storage();
}

bool shares_otherwise(const Recording& a, const Recording& b) {
  return has_inputs_found_in(a, b) || has_inputs_found_in(b, a);
}

bool is_apart(const Recording& recording, const std::vector<at::Tensor>& inputs) {
  return std::none_of(inputs.begin(), inputs.end(),
                      [&](const at::Tensor& input) { return found_by_itself(recording, storage_of(input)); });
}

bool has_memory_of_inputs(const Recording& recording, const std::vector<at::Tensor>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (storage_of(arguments[i]) != recording.inputs.at(i).storage._unsafe_get_target()) return false;
  }
  return true;
}

bool is_in_place(const Recording& recording) {
  return std::all_of(recording.outer_tensors.begin(), recording.outer_tensors.end(), [](const OuterTensor& outer) {
    const at::Tensor t = outer.tensor.lock();
    return !outer.is_of_surroundings() || !t.defined() || outer.place.holds(t);
  });
}

}  // namespace serried::graph
