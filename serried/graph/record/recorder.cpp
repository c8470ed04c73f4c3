// Finds out which value each tensor is, and appends one node per op.
#include "serried/graph/record/recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

#include "serried/graph/record/hooks.h"
#include "serried/graph/record/phases.h"
#include "serried/graph/record/recorded_work.h"
#include "serried/graph/text/custom_class.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool has_layout(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage();
}

// c10d's gather and scatter take lists of lists.
bool is_nested_list(const IValue& value) {
  return value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList();
}

// Whether autograd runs on this thread: its own ops, and those of hooks.
bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// That of an op about to run, undefined where it draws nothing.
at::Generator generator_of(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  for (const IValue& value : arguments) {
    if (value.isGenerator()) return value.toGenerator();
  }
  return is_random(op) ? at::detail::getDefaultCPUGenerator() : at::Generator();
}

}  // namespace

Recorder::Recorder(const std::vector<at::Tensor>& arguments, std::vector<RecordedFact> known)
    : known_(std::move(known)), link_(std::make_shared<Link>()) {
  watch_registrations();
  link_->wait = [this](ValueId work) { note_wait(work); };
  for (const at::Tensor& argument : arguments) {
    const at::Tensor t = part_of(argument);
    recording_.inputs.emplace_back(t);
    const int number = int(graph().inputs().size());
    if (!t.defined()) {
      graph().inputs().push_back(kNoValue);
      continue;
    }
    if (refuse_odd(t, "an argument of the function") || refuse_lazy(t)) return;
    arguments_.insert({{t.unsafeGetTensorImpl(), number}, {argument.unsafeGetTensorImpl(), number}});
    ValueId id = find_known(t);
    if (id == kNoValue) {
      id = graph().add_value({.kind = ValueKind::input, .meta = meta_of(t)});
      remember(t, id);
    }
    note_outer(t.unsafeGetTensorImpl(), id);
    graph().inputs().push_back(id);
  }
}

Recorder::~Recorder() {
  link_->wait = nullptr;
}

// Same memory, seen the same way: SavedVariable and .data() make such copies without an op.
Recorder::Layout Recorder::layout_of(const at::Tensor& t) {
  if (!has_layout(t)) return {};
  Layout layout = {reinterpret_cast<int64_t>(t.storage().unsafeGetStorageImpl()), t.storage_offset(),
                   int64_t(t.scalar_type()), int64_t(t.is_conj()) * 2 + int64_t(t.is_neg()), t.dim()};
  layout.append(t.sizes().begin(), t.sizes().end());
  layout.append(t.strides().begin(), t.strides().end());
  return layout;
}

void Recorder::remember(const at::Tensor& t, ValueId id) {
  const Layout layout = layout_of(t);
  by_impl_.insert_or_assign(t.unsafeGetTensorImpl(), Known{id, layout});
  impls_.emplace_back(t);
  if (!has_layout(t)) return;
  by_layout_[layout] = id;
  const auto [first, is_new] = by_storage_.emplace(t.storage().unsafeGetStorageImpl(), id);
  if (is_new) refuse_overlap(t);
  if (is_new) storages_.push_back(t.storage().getWeakStorageImpl());
  graph().value(id).storage = is_new ? int32_t(by_storage_.size()) - 1 : graph().value(first->second).storage;
}

bool Recorder::has_memory_of(const at::Tensor& t, ValueId id) const {
  if (!has_layout(t)) return true;
  const auto first = by_storage_.find(t.storage().unsafeGetStorageImpl());
  return first != by_storage_.end() &&
         recording_.graph.value(first->second).storage == recording_.graph.value(id).storage;
}

// An op such as t_() has given a tensor another layout: what lies as it did before is not this value any more.
void Recorder::note_layout(const at::Tensor& t, Known& known) {
  Layout layout = layout_of(t);
  if (layout == known.layout) return;
  const auto before = by_layout_.find(known.layout);
  if (before != by_layout_.end() && before->second == known.id) by_layout_.erase(before);
  known.layout = std::move(layout);
  by_layout_.insert_or_assign(known.layout, known.id);
}

ValueId Recorder::find_known(const at::Tensor& t) const {
  if (!t.defined()) return kNoValue;
  const auto same = by_impl_.find(t.unsafeGetTensorImpl());
  const Layout layout = layout_of(t);
  // set_data() gives a tensor another layout without an op.
  if (same != by_impl_.end() && same->second.layout == layout) return same->second.id;
  if (!has_layout(t)) return kNoValue;
  const auto alike = by_layout_.find(layout);
  return alike != by_layout_.end() ? alike->second : kNoValue;
}

bool Recorder::is_as_ops_left(const at::Tensor& t) const {
  const auto known = by_impl_.find(t.unsafeGetTensorImpl());
  return known != by_impl_.end() && known->second.layout == layout_of(t);
}

ValueId Recorder::find(const at::Tensor& t) {
  if (!t.defined()) return kNoValue;
  const ValueId known = find_known(t);
  if (known != kNoValue) {
    // A second name of what is there: the parameter itself, after a copy of it; what an argument is an alias of.
    note_outer(t.unsafeGetTensorImpl(), known);
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
  append({op,
          {Argument::of_value(base), Argument::of(t.sizes().vec()), Argument::of(t.strides().vec()),
           Argument::of(t.storage_offset())},
          {{id}}});
  remember(t, id);
  recording_.views.push_back(id);
  note_outer(t.unsafeGetTensorImpl(), id);  // mostly: one that lives shorter is gone when outer tensors are looked at
  return id;
}

ValueId Recorder::add_external(const at::Tensor& t) {
  if (refuse_odd(t, "an operand")) return graph().add_value({.kind = ValueKind::persistent});
  const ValueId id = graph().add_value({.kind = ValueKind::persistent, .meta = meta_of(t), .tensor = t});
  recording_.externals.push_back(id);
  remember(t, id);
  note_outer(t.unsafeGetTensorImpl(), id);
  return id;
}

void Recorder::note_outer(c10::TensorImpl* impl, ValueId value) {
  if (!seen_outer_.insert(impl).second) return;
  const at::Tensor t(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  const at::Tensor grad = t.requires_grad() && t.is_leaf() ? t.grad() : at::Tensor();
  const auto argument = arguments_.find(impl);
  const int input = argument != arguments_.end() ? argument->second : -1;
  recording_.outer_tensors.push_back({t, value, version_of(t), grad.defined(), grad, place_of(t), t.requires_grad(),
                                      history_of(t), input, is_made_inside(value)});
  if (input >= 0 && num_user_hooks(t) > 0) hooked_input_ = meta_of(t).to_string();
  share_hooks(t);
}

bool Recorder::is_made_inside(ValueId id) const {
  if (id == kNoValue) return false;
  const ValueKind kind = value(id).kind;
  const bool is_view = std::count(recording_.views.begin(), recording_.views.end(), id) > 0;
  return kind == ValueKind::constant || (kind == ValueKind::computed && !is_view);
}

void Recorder::note_lasting(const Recording& before) {
  std::unordered_map<const c10::TensorImpl*, const OuterTensor*> met;
  for (const OuterTensor& outer : before.outer_tensors) met.emplace(outer.tensor.address(), &outer);
  for (OuterTensor& outer : recording_.outer_tensors) {
    const auto found = met.find(outer.tensor.address());
    if (found == met.end()) continue;
    outer.is_lasting = true;
    outer.was_found = outer.input >= 0 && found->second->is_of_surroundings();
  }
}

void Recorder::make_input(ValueId id, const at::Tensor& t) {
  std::erase(recording_.externals, id);
  for (OuterTensor& outer : recording_.outer_tensors) {
    if (outer.value == id) outer.input = int(graph().inputs().size());
  }
  recording_.inputs.emplace_back(t);
  graph().value(id).kind = ValueKind::input;
  graph().value(id).tensor.reset();
  graph().inputs().push_back(id);
}

void Recorder::meet(c10::TensorImpl* dtensor) {
  const at::Tensor& part = dtensor_meta(dtensor)->local;
  const ValueId known = find_known(part);
  // Results of the function itself are no outer tensors; a part of memory that was there is one, though it was met as
  // a view of another.
  if (known == kNoValue || graph().value(known).kind != ValueKind::computed || !is_made_inside(known)) {
    note_outer(dtensor, find(part));
  }
}

ValueId Recorder::define(const at::Tensor& t) {
  if (!t.defined()) return kNoValue;
  const auto same = by_impl_.find(t.unsafeGetTensorImpl());
  if (same != by_impl_.end() && has_memory_of(t, same->second.id)) {
    note_layout(t, same->second);
    return same->second.id;
  }
  if (refuse_odd(t, "a result")) return kNoValue;
  const ValueId id = graph().add_value({.kind = ValueKind::computed, .meta = meta_of(t)});
  remember(t, id);
  // set_() and its kin give other memory to a tensor that was there.
  const bool is_new = seen_outer_.count(t.unsafeGetTensorImpl()) == 0;
  if (is_new) made_.push_back({t, t.storage().getWeakStorageImpl(), id});
  return id;
}

ValueId Recorder::define_work(IValue& slot) {
  const ValueId id = graph().add_value({.kind = ValueKind::work});
  on_their_way_.push_back(id);
  auto work = c10::make_intrusive<RecordedWork>(slot.toCustomClass<c10d::Work>(), link_, id);
  works_.push_back({work->life(), graph().nodes().size()});
  slot = IValue(c10::intrusive_ptr<c10d::Work>(std::move(work)));
  return id;
}

std::unordered_set<int32_t> Recorder::storages_handed_out() const {
  std::unordered_set<int32_t> storages;
  const auto add = [&](const Node& node) {
    for_each_operand(node, [&](ValueId id) { storages.insert(value(id).storage); });
  };
  for (const LiveWork& work : works_) {
    if (!work.life.expired()) add(recording_.graph.nodes().at(work.node));
  }
  for (const Node& node : recording_.graph.nodes()) {
    if (node.op.operator_name().name == "serried::call_hook") add(node);
  }
  return storages;
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
    add_group(group);
    return {Argument::Kind::group, group->getGroupName(), {}};
  }
  return value.isGenerator() ? argument_of(value.toGenerator()) : Argument::of(value);
}

void Recorder::add_group(const Group& group) {
  std::vector<Group>& known = recording_.groups;
  if (std::find(known.begin(), known.end(), group) == known.end()) known.push_back(group);
}

void Recorder::replay_together(const std::string& group) {
  add_group(c10d::resolve_process_group(group));
  std::vector<std::string>& known = recording_.together;
  if (std::find(known.begin(), known.end(), group) == known.end()) known.push_back(group);
}

// Held weakly: the user may put another one in its place.
Argument Recorder::argument_of(const at::Generator& generator) {
  if (!generator.defined() || generator == at::detail::getDefaultCPUGenerator()) return Argument::of(generator);
  std::vector<WeakGenerator>& known = recording_.generators;
  const auto found = std::find_if(known.begin(), known.end(), [&](const WeakGenerator& weak) {
    return weak._unsafe_get_target() == generator.unsafeGetGeneratorImpl();
  });
  const int64_t number = found - known.begin();
  if (found == known.end()) known.emplace_back(generator.getIntrusivePtr());
  return {Argument::Kind::generator, number, {}};
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

void Recorder::run(const c10::OperatorHandle& op, Stack& stack) {
  if (refusal_) return tape::run_unrecorded(op, stack);
  running_ = op;
  Node node{op, {}, {}};
  const auto values = torch::jit::last(stack, op.schema().arguments().size());
  for (const IValue& value : values) node.arguments.push_back(argument_of(value));
  const at::Generator generator = generator_of(op, values);
  if (generator.defined()) refuse_generator(generators_.change_of(generator));
  check_supported(op, node);
  adopt_operands(node);
  recording_.ran_backward |= is_in_backward();
  tape::run_unrecorded(op, stack);
  if (generator.defined()) generators_.note(generator);
  note_writes(node);
  if (keep_results(node, stack)) {
    append(std::move(node));
  } else {
    recording_.host_reads.push_back({c10::toString(op.operator_name()), graph().nodes().size()});
  }
  running_.reset();
}

void Recorder::append(Node node) {
  if (is_in_backward()) node.phase = Phase::backward;
  graph().add_node(std::move(node));
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
  note_makers(node);
  return has_values;
}

void Recorder::note_wait(ValueId work) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::wait", "");
  append({op, {Argument::of_value(work)}, {}});
  std::erase(on_their_way_, work);
}

// A replay must not end while somebody writes into its memory.
void Recorder::wait_for_all() {
  const std::vector<ValueId> works = on_their_way_;
  for (ValueId work : works) note_wait(work);
}

at::Tensor Recorder::call_hook(std::shared_ptr<const TensorHook> fn, const at::Tensor& grad) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::call_hook", "");
  const DTensorMeta* dtensor = grad.defined() ? dtensor_meta(grad) : nullptr;
  const SpecPtr spec = dtensor != nullptr ? dtensor->spec : SpecPtr();
  recording_.hooks.push_back({std::move(fn), spec});
  const HooksScope hooks(recording_.hooks);
  Stack stack = {dtensor != nullptr ? dtensor->local : grad, int64_t(recording_.hooks.size()) - 1};
  run(op, stack);
  const at::Tensor result = stack.at(0).toTensor();
  return spec ? wrap(result, spec) : result;
}

bool RecordedFact::is_about(const tape::Fact& other) const {
  return other.subject != nullptr && other.subject == fact.subject && other.name == fact.name;
}

bool all_hold(const std::vector<RecordedFact>& facts) {
  return std::all_of(facts.begin(), facts.end(), [](const RecordedFact& fact) { return fact.holds(); });
}

void Recorder::rely_on(tape::Fact fact) {
  const auto is_it = [&](const RecordedFact& recorded) { return recorded.is_about(fact); };
  if (std::any_of(recording_.facts.begin(), recording_.facts.end(), is_it)) return;
  const auto known = std::find_if(known_.begin(), known_.end(), is_it);
  const uint64_t value = known != known_.end() ? known->value : fact.value();
  recording_.facts.push_back({std::move(fact), value});
}

void Recorder::rely_on_now(tape::Fact fact) {
  const uint64_t value = fact.value();
  recording_.facts.push_back({std::move(fact), value});
}

void Recorder::rely_on_life(const std::string& name, std::weak_ptr<const void> object) {
  const auto is_it = [&](const LiveObject& known) {
    return !known.object.owner_before(object) && !object.owner_before(known.object);
  };
  if (std::any_of(recording_.objects.begin(), recording_.objects.end(), is_it)) return;
  recording_.objects.push_back({name, std::move(object)});
}

void Recorder::rely_on_hooks() {
  std::vector<WeakTensor> leaves;
  for (const OuterTensor& outer : recording_.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (t.defined() && t.requires_grad()) leaves.push_back(outer.tensor);
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

void Recorder::note_hooks_before(const at::Tensor& t) {
  const auto is_it = [&](const HookedTensor& known) { return known.tensor.address() == t.unsafeGetTensorImpl(); };
  if (std::none_of(hooked_.begin(), hooked_.end(), is_it)) hooked_.push_back({t, num_user_hooks(t)});
}

void Recorder::note_hooks_left() {
  for (const HookedTensor& hooked : hooked_) {
    const at::Tensor t = hooked.tensor.lock();
    if (!t.defined() || !t.is_leaf() || num_user_hooks(t) <= hooked.num_hooks) continue;
    const at::Tensor part = part_of(t);
    const auto is_it = [&](const MadeTensor& made) { return made.tensor.address() == part.unsafeGetTensorImpl(); };
    if (arguments_.count(t.unsafeGetTensorImpl()) > 0 || std::any_of(made_.begin(), made_.end(), is_it)) continue;
    recording_.hook_left_on = meta_of(t).to_string();
  }
}

StepMemory Recorder::step_memory() const {
  StepMemory memory;
  for (const OuterTensor& outer : recording_.outer_tensors) {
    // Activations are met under second names too.
    if (!outer.required_grad || outer.is_alias || outer.value == kNoValue || value(outer.value).storage < 0) continue;
    memory.parameters.insert(value(outer.value).storage);
    const at::Tensor t = outer.tensor.lock();
    const ValueId grad = t.defined() && t.is_leaf() ? find_known(part_of(t.grad())) : kNoValue;
    if (grad != kNoValue && value(grad).storage >= 0) memory.gradients.insert(value(grad).storage);
  }
  return memory;
}

Recording Recorder::take() {
  link_->wait = nullptr;
  refuse_generator(generators_.any_change());
  refuse_moved();
  refuse_other_history();
  raise_refusal();
  wait_for_all();
  adopt_results();
  find_phases(graph(), step_memory());
  check_hooks_of_inputs();
  note_hooks_left();
  rely_on_hooks();
  // Aliases: a recording must not keep the user's own tensors, with their gradients, alive, nor from being replaced.
  for (ValueId id : recording_.externals) {
    at::Tensor& t = graph().value(id).tensor;
    if (!t.unsafeGetTensorImpl()->is_wrapped_number()) t = t.variable_data();
  }
  // What the function made and dropped on its way is its own.
  std::erase_if(recording_.objects, [](const LiveObject& known) { return known.object.expired(); });
  Recording taken = std::move(recording_);
  recording_.groups = taken.groups;
  return taken;
}

}  // namespace serried::graph
