// Finds out which value each tensor is, and appends one node per op.
#include "serried/graph/recorder.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "serried/graph/custom_class.h"
#include "serried/graph/error.h"
#include "serried/graph/recorded_work.h"
#include "serried/graph/user_hooks.h"
#include "serried/tensor/meta.h"

namespace serried::graph {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Same memory, seen the same way: SavedVariable and .data() make such copies without an op.
std::string layout_key(const at::Tensor& t) {
  std::string key;
  const auto put = [&](int64_t number) { key.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  put(reinterpret_cast<int64_t>(t.storage().unsafeGetStorageImpl()));
  put(t.storage_offset());
  put(int64_t(t.scalar_type()));
  put(int64_t(t.is_conj()) * 2 + int64_t(t.is_neg()));
  put(t.dim());
  for (int64_t size : t.sizes()) put(size);
  for (int64_t stride : t.strides()) put(stride);
  return key;
}

bool has_layout(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage();
}

// c10d's gather and scatter take lists of lists.
bool is_nested_list(const IValue& value) {
  return value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList();
}

// Ops that look at the shape of their operand only.
bool reads_no_data(const std::string& name) {
  return name.ends_with("_like") || name.starts_with("aten::new_") || name.starts_with("aten::sym_");
}

bool makes_unwritten(const std::string& name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

// index() with masks has a shape that depends on data, with numbers it has not.
bool has_mask(const Node& node, const Graph& graph) {
  bool found = false;
  for (ValueId id : node.arguments.at(1).ids) {
    if (id == kNoValue) continue;
    const at::ScalarType dtype = graph.value(id).meta.dtype;
    found |= dtype == at::kBool || dtype == at::kByte;
  }
  return found;
}

}  // namespace

Recorder::Recorder(const std::vector<at::Tensor>& inputs) : link_(std::make_shared<Link>()) {
  watch_registrations();
  link_->wait = [this](ValueId work) { note_wait(work); };
  for (const at::Tensor& t : inputs) {
    if (!t.defined()) {
      graph().inputs().push_back(kNoValue);
      continue;
    }
    ValueId id = find_known(t);
    if (id == kNoValue) {
      id = graph().add_value({.kind = ValueKind::input, .meta = meta_of(t)});
      remember(t, id);
      note_resident(t.unsafeGetTensorImpl(), id);
    }
    graph().inputs().push_back(id);
  }
}

Recorder::~Recorder() {
  link_->wait = nullptr;
}

void Recorder::remember(const at::Tensor& t, ValueId id) {
  by_impl_[t.unsafeGetTensorImpl()] = id;
  impls_.emplace_back(t);
  if (!has_layout(t)) return;
  by_layout_[layout_key(t)] = id;
  const auto [first, is_new] = by_storage_.emplace(t.storage().unsafeGetStorageImpl(), id);
  if (is_new) storages_.push_back(t.storage().getWeakStorageImpl());
  graph().value(id).storage = is_new ? int32_t(by_storage_.size()) - 1 : graph().value(first->second).storage;
}

// set_data() gives a tensor other memory without an op.
bool Recorder::has_memory_of(const at::Tensor& t, ValueId id) const {
  if (!has_layout(t)) return true;
  const auto first = by_storage_.find(t.storage().unsafeGetStorageImpl());
  return first != by_storage_.end() &&
         recording_.graph.value(first->second).storage == recording_.graph.value(id).storage;
}

ValueId Recorder::find_known(const at::Tensor& t) const {
  if (!t.defined()) return kNoValue;
  const auto same = by_impl_.find(t.unsafeGetTensorImpl());
  if (same != by_impl_.end() && has_memory_of(t, same->second)) return same->second;
  if (!has_layout(t)) return kNoValue;
  const auto alike = by_layout_.find(layout_key(t));
  return alike != by_layout_.end() ? alike->second : kNoValue;
}

ValueId Recorder::find(const at::Tensor& t) {
  if (!t.defined()) return kNoValue;
  const ValueId known = find_known(t);
  if (known != kNoValue) {
    // The parameter itself, after a copy of it.
    if (t.requires_grad() && graph().value(known).kind == ValueKind::persistent) {
      note_resident(t.unsafeGetTensorImpl(), known);
    }
    return known;
  }
  if (has_layout(t)) {
    const auto base = by_storage_.find(t.storage().unsafeGetStorageImpl());
    if (base != by_storage_.end()) return restride(base->second, t);
  }
  return add_external(t);
}

// A view that was made without an op.
ValueId Recorder::restride(ValueId base, const at::Tensor& t) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
  const ValueId id = graph().add_value({.kind = ValueKind::computed, .meta = meta_of(t)});
  graph().add_node({op,
                    {Argument::of_value(base), Argument::of(t.sizes().vec()), Argument::of(t.strides().vec()),
                     Argument::of(t.storage_offset())},
                    {{id}}});
  remember(t, id);
  return id;
}

ValueId Recorder::add_external(const at::Tensor& t) {
  const ValueId id = graph().add_value({.kind = ValueKind::persistent, .meta = meta_of(t), .tensor = t});
  recording_.externals.push_back(id);
  remember(t, id);
  note_resident(t.unsafeGetTensorImpl(), id);
  return id;
}

void Recorder::note_resident(c10::TensorImpl* impl, ValueId value) {
  if (!residents_.insert(impl).second) return;
  const at::Tensor t(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  const at::Tensor grad = t.requires_grad() && t.is_leaf() ? t.grad() : at::Tensor();
  recording_.residents.push_back({t, value, t.is_inference() ? 0 : uint32_t(t._version()), grad.defined(), grad});
  const bool is_input = value != kNoValue && graph().value(value).kind == ValueKind::input;
  if (is_input && num_user_hooks(t) > 0) hooked_input_ = meta_of(t).to_string();
  share_hooks(t);
}

void Recorder::make_input(ValueId id) {
  std::erase(recording_.externals, id);
  graph().value(id).kind = ValueKind::input;
  graph().value(id).tensor.reset();
  graph().inputs().push_back(id);
}

void Recorder::rely_on(Witness witness) {
  if (witness.subject != nullptr && !subjects_.insert(witness.subject).second) return;
  recording_.witnesses.push_back(std::move(witness));
}

void Recorder::meet(c10::TensorImpl* dtensor) {
  const at::Tensor& part = dtensor_meta(dtensor)->local;
  const ValueId known = find_known(part);
  // Results of the function itself are no residents.
  if (known == kNoValue || graph().value(known).kind != ValueKind::computed) note_resident(dtensor, find(part));
}

ValueId Recorder::define(const at::Tensor& t) {
  if (!t.defined()) return kNoValue;
  const auto same = by_impl_.find(t.unsafeGetTensorImpl());
  if (same != by_impl_.end() && has_memory_of(t, same->second)) return same->second;
  const ValueId id = graph().add_value({.kind = ValueKind::computed, .meta = meta_of(t)});
  remember(t, id);
  return id;
}

ValueId Recorder::define_work(IValue& slot) {
  const ValueId id = graph().add_value({.kind = ValueKind::work});
  slot = IValue(
      c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<RecordedWork>(slot.toCustomClass<c10d::Work>(), link_, id)));
  return id;
}

Argument Recorder::argument_of(const IValue& value) {
  if (value.isTensor()) return Argument::of_value(find(value.toTensor()));
  if (value.isTensorList()) return Argument::of_values(find_all(value.toTensorVector()));
  if (value.isOptionalTensorList()) {
    Argument argument{Argument::Kind::optional_values, {}, {}};
    for (const auto& t : value.toOptionalTensorVector()) argument.ids.push_back(t ? find(*t) : kNoValue);
    return argument;
  }
  if (is_nested_list(value)) {
    Argument argument{Argument::Kind::nested_values, {}, {}};
    c10::List<int64_t> lengths;
    for (const IValue& list : value.toListRef()) {
      for (ValueId id : find_all(list.toTensorVector())) argument.ids.push_back(id);
      lengths.push_back(int64_t(list.toListRef().size()));
    }
    argument.constant = lengths;
    return argument;
  }
  if (is_group(value)) {
    const Group group = value.toCustomClass<c10d::ProcessGroup>();
    if (std::find(recording_.groups.begin(), recording_.groups.end(), group) == recording_.groups.end()) {
      recording_.groups.push_back(group);
    }
    return {Argument::Kind::group, group->getGroupName(), {}};
  }
  return Argument::of(value);
}

std::vector<ValueId> Recorder::find_all(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueId> ids;
  ids.reserve(tensors.size());
  for (const at::Tensor& t : tensors) ids.push_back(find(t));
  return ids;
}

std::vector<ValueId> Recorder::results_of(IValue& value) {
  if (value.isTensor()) return {define(value.toTensor())};
  if (is_work(value)) return {define_work(value)};
  std::vector<ValueId> ids;
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) ids.push_back(define(t));
  }
  return ids;
}

void Recorder::note_writes(const Node& node) {
  if (unwritten_.empty()) return;
  for_each_written(node, [&](ValueId id) { unwritten_.erase(graph().value(id).storage); });
}

// What torch::tensor({1, 2}) made: empty() and then plain stores. Its data is a constant, if it stays the same.
void Recorder::adopt_unwritten(const Node& node, const Stack& stack) {
  if (unwritten_.empty() || is_view(node.op.schema()) || reads_no_data(node.op.operator_name().name)) return;
  const auto values = torch::jit::last(stack, node.arguments.size());
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (is_written(node.op.schema(), i)) continue;
    if (values[i].isTensor() && values[i].toTensor().defined()) adopt(node.arguments[i].ids[0], values[i].toTensor());
    if (!values[i].isTensorList()) continue;
    const std::vector<at::Tensor> tensors = values[i].toTensorVector();
    for (size_t k = 0; k < tensors.size(); ++k) {
      if (tensors[k].defined()) adopt(node.arguments[i].ids[k], tensors[k]);
    }
  }
}

void Recorder::adopt(ValueId id, const at::Tensor& t) {
  if (t.numel() == 0 || unwritten_.erase(graph().value(id).storage) == 0) return;
  const ValueId base = by_storage_.at(t.storage().unsafeGetStorageImpl());
  Value& value = graph().value(base);
  const PauseTap pause;
  at::Tensor whole = at::empty({0}, t.options());
  whole.set_(t.storage(), value.meta.offset, value.meta.sizes, value.meta.strides);
  value.kind = ValueKind::constant;
  value.tensor = whole.clone();
  recording_.externals.push_back(base);
}

void Recorder::check_supported(const c10::OperatorHandle& op, const Node& node) {
  if (refusal_ || !op.hasTag(at::Tag::dynamic_output_shape)) return;
  const std::string name = op.operator_name().name;
  if (name.starts_with("aten::index") && !has_mask(node, recording_.graph)) return;
  refusal_ =
      CaptureError({CaptureErrorKind::data_dependent_shape,
                    c10::toString(op.operator_name()),
                    "",
                    "the shape of its result depends on the data, and a replay runs with fixed shapes",
                    {"use a form of fixed shape: torch::where, a mask that is multiplied in, index with a list of "
                     "fixed length",
                     "keep this part out of the captured function"}});
}

void Recorder::raise_refusal() const {
  if (refusal_) throw *refusal_;
}

void Recorder::run(const c10::OperatorHandle& op, Stack& stack) {
  Node node{op, {}, {}};
  for (const IValue& value : torch::jit::last(stack, op.schema().arguments().size())) {
    node.arguments.push_back(argument_of(value));
  }
  check_supported(op, node);
  adopt_unwritten(node, stack);
  recording_.ran_backward |= torch::autograd::get_current_graph_task_id() != -1;
  run_untapped(op, stack);
  note_writes(node);
  if (keep_results(node, stack)) {
    graph().add_node(std::move(node));
  } else {
    recording_.host_reads.push_back({c10::toString(op.operator_name()), graph().nodes().size()});
  }
}

// False where the op gave the host a number and nothing else.
bool Recorder::keep_results(Node& node, Stack& stack) {
  const size_t num_returns = node.op.schema().returns().size();
  bool has_values = num_returns == 0;
  for (size_t r = 0; r < num_returns; ++r) {
    IValue& value = stack[stack.size() - num_returns + r];
    has_values |= value.isTensor() || value.isTensorList() || is_work(value);
    node.results.push_back(results_of(value));
  }
  if (makes_unwritten(node.op.operator_name().name)) {
    for_each_result(node, [&](ValueId id) { unwritten_.insert(graph().value(id).storage); });
  }
  return has_values;
}

void Recorder::note_wait(ValueId work) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::wait", "");
  graph().add_node({op, {Argument::of_value(work)}, {}});
}

at::Tensor Recorder::call_hook(std::shared_ptr<const TensorHook> fn, const at::Tensor& grad) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::call_hook", "");
  const DTensorMeta* dtensor = grad.defined() ? dtensor_meta(grad) : nullptr;
  const SpecPtr spec = dtensor != nullptr ? dtensor->spec : SpecPtr();
  recording_.hooks.push_back({std::move(fn), spec});
  const HooksGuard hooks(recording_.hooks);
  Stack stack = {dtensor != nullptr ? dtensor->local : grad, int64_t(recording_.hooks.size()) - 1};
  run(op, stack);
  const at::Tensor result = stack.at(0).toTensor();
  return spec ? wrap(result, spec) : result;
}

// Another tensor comes with the next call, with hooks of its own.
void Recorder::check_hooks_of_inputs() const {
  if (hooked_input_.empty()) return;
  throw CaptureError({CaptureErrorKind::unsupported,
                      "",
                      "",
                      "the argument " + hooked_input_ + " came with a hook on its gradient; the next may have another",
                      {"register the hook inside of the captured function"}});
}

void Recorder::rely_on_hooks() {
  std::vector<WeakTensor> leaves;
  for (const Resident& resident : recording_.residents) {
    const at::Tensor t = resident.tensor.lock();
    if (t.defined() && t.requires_grad()) leaves.push_back(resident.tensor);
  }
  rely_on({"changes to hooks on parameters", [leaves = std::move(leaves)] {
             uint64_t changes = 0;
             for (const WeakTensor& leaf : leaves) {
               const at::Tensor t = leaf.lock();
               if (t.defined()) changes += hook_changes(t);
             }
             return changes;
           }});
}

Recording Recorder::take() {
  check_hooks_of_inputs();
  rely_on_hooks();
  return std::move(recording_);
}

}  // namespace serried::graph
