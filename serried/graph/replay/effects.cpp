// Gradients and version counts, read after a recording and restored after a replay.
#include "serried/graph/replay/effects.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>
#include <utility>

#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

bool is_parameter(const at::Tensor& t) {
  return t.defined() && t.requires_grad() && t.is_leaf();
}

size_t num_handles_of(const at::Tensor& grad) {
  const DTensorMeta* meta = grad.defined() ? dtensor_meta(grad) : nullptr;
  return std::max(grad.use_count(), meta != nullptr ? meta->local.use_count() : 1);
}

GradientState state_of(const WeakTensor& parameter, bool had_grad, const at::Tensor& grad) {
  const at::Tensor part = part_of(grad);
  GradientState state{parameter, had_grad, grad, part, spec_of(grad)};
  if (storage_of(part) == nullptr || part.layout() != at::kStrided) return state;
  state.storage = part.storage().getWeakStorageImpl();
  state.meta = meta_of(part);
  state.owns_memory = owns_storage(part);
  return state;
}

GradientState state_before(const std::vector<GradientState>& before, const OuterTensor& outer) {
  for (const GradientState& state : before) {
    if (state.parameter.address() == outer.tensor.address()) return state;
  }
  return state_of(outer.tensor, outer.had_grad, outer.grad.lock());
}

// Storages that others than the ops of the graph know: of two values from outside, or seen through a view that no op
// made.
std::set<int32_t> shared_storages(const Graph& graph) {
  std::set<int32_t> shared, from_outside;
  for (const Value& value : graph.values()) {
    if (value.kind == ValueKind::computed || value.storage < 0) continue;
    if (!from_outside.insert(value.storage).second) shared.insert(value.storage);
  }
  for (const Node& node : graph.nodes()) {
    if (node.op.operator_name().name != "aten::as_strided") continue;
    for_each_result(node, [&](ValueId id) { shared.insert(graph.value(id).storage); });
  }
  return shared;
}

// Others in whose hands the function met the value, such as `snapshot = p.grad().detach()`. What nobody holds at the
// end but the graph, or as the gradient `after`, was made inside, as zero_grad() does.
std::vector<WeakTensor> sharers_of(const Recorder& recorder, ValueId id, const GradientState& state,
                                   const at::Tensor& after) {
  const at::Tensor& in_graph = recorder.value(id).tensor;
  std::vector<WeakTensor> sharers;
  for (const OuterTensor& outer : recorder.outer_tensors()) {
    const c10::TensorImpl* met = outer.tensor.address();
    if (outer.value != id || met == state.grad.address() || met == state.part.address()) continue;
    const size_t explained = size_t(met == in_graph.unsafeGetTensorImpl()) + size_t(met == after.unsafeGetTensorImpl());
    if (outer.is_of_surroundings() && outer.tensor.num_handles() > explained) sharers.push_back(outer.tensor);
  }
  return sharers;
}

// Whether another tensor may take its place.
bool is_exchangeable(const Value& value, const GradientState& state, const std::set<int32_t>& shared) {
  return value.kind == ValueKind::persistent && value.storage >= 0 && state.owns_memory &&
         shared.count(value.storage) == 0;
}

bool is_used(const Graph& graph, ValueId id) {
  const auto gives = [id](const Gradient& gradient) { return gradient.value == id; };
  return !graph.uses(id).empty() || std::count(graph.outputs().begin(), graph.outputs().end(), id) > 0 ||
         std::any_of(graph.gradients().begin(), graph.gradients().end(), gives);
}

bool is_outer(const Recorder& recorder, const at::Tensor& t) {
  const auto is_it = [&](const OuterTensor& outer) { return outer.tensor.address() == t.unsafeGetTensorImpl(); };
  return std::any_of(recorder.outer_tensors().begin(), recorder.outer_tensors().end(), is_it);
}

bool is_in_persistent_memory(const Graph& graph, const Value& value) {
  const auto has_it = [&](const Value& other) {
    return other.kind == ValueKind::persistent && other.storage == value.storage;
  };
  return value.storage >= 0 && std::any_of(graph.values().begin(), graph.values().end(), has_it);
}

// Whether the call gives this very tensor every time, such as a part of a bucket.
bool is_kept(Recorder& recorder, const at::Tensor& grad, const Value& value) {
  if (value.kind == ValueKind::input) return false;
  if (value.kind != ValueKind::computed) return true;
  return is_outer(recorder, grad) && is_in_persistent_memory(recorder.graph(), value);
}

// Autograd counts versions; ops of a replay run below it, so the count is made up for.
void raise_version(const at::Tensor& t, uint32_t version) {
  if (t.is_inference()) return;
  while (version_of(t) < version) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

std::vector<GradientState> gradients_of(const std::vector<OuterTensor>& outer_tensors) {
  std::vector<GradientState> states;
  for (const OuterTensor& outer : outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!is_parameter(t)) continue;
    const size_t num_handles = num_handles_of(t.grad());
    states.push_back(state_of(t, t.grad().defined(), t.grad()));
    states.back().num_handles = num_handles;
  }
  return states;
}

bool same_gradients(const std::vector<GradientState>& before) {
  return std::all_of(before.begin(), before.end(), [](const GradientState& state) {
    const at::Tensor t = state.parameter.lock();
    return !t.defined() || state.is_like(t.grad());
  });
}

at::Tensor GradientState::remaining_part() const {
  at::Tensor t = part.lock();
  const auto memory = storage.lock();
  if (t.defined() || !memory) return t;
  const tape::Pause off_tape;
  t = at::empty({0}, at::TensorOptions(meta.dtype).device(meta.device));
  return t.set_(c10::Storage(memory), meta.offset, meta.sizes, meta.strides);
}

bool GradientState::is_like(const at::Tensor& now) const {
  const GradientState other = state_of(parameter, now.defined(), now);
  if (had_grad != other.had_grad || spec != other.spec || meta.strides != other.meta.strides) return false;
  // Those of fully sharded parameters are parts of memory that every backward makes anew.
  const at::Tensor of = parameter.lock();
  if (of.defined() && detail::gather_of(of) != nullptr) return true;
  return owns_memory == other.owns_memory &&
         (owns_memory || storage._unsafe_get_target() == other.storage._unsafe_get_target());
}

Effects::Effects(Recorder& recorder, const std::vector<GradientState>& before,
                 const std::vector<at::Tensor>& arguments) {
  const std::vector<OuterTensor> outer_tensors = recorder.outer_tensors();
  const std::set<int32_t> shared = shared_storages(recorder.graph());
  first_added_ = recorder.graph().inputs().size();
  struct Met {
    Leaf leaf;
    GradientState state;
    int input;
  };
  std::vector<Met> leaves;
  for (const OuterTensor& outer : outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!is_parameter(t) || (outer.input < 0 && !outer.is_of_surroundings())) continue;
    const Leaf leaf{t, outer.input};
    const GradientState state = state_before(before, outer);
    add_shared(leaf, state, arguments);
    leaves.push_back({leaf, state, add_input(recorder, leaf, state, shared)});
  }
  // Once all inputs are known: the gradient of one leaf may be what another one had.
  for (const Met& met : leaves) add_gradient(recorder, met.leaf, met.state, met.input);
  for (const OuterTensor& outer : recorder.outer_tensors()) add_bump(outer);
}

void Effects::add_gradient(Recorder& recorder, const Leaf& leaf, const GradientState& state, int input) {
  const at::Tensor before = state.grad.lock();  // undefined also where the call has dropped it
  const at::Tensor after = leaf.tensor.lock().grad();
  const bool is_added = input >= 0;
  const bool was_used = before.defined() && recorder.find_known(part_of(before)) != kNoValue;
  if (!state.had_grad || (was_used && !is_added && after.is_same(before)))
    expected_.push_back({leaf, before.defined(), before});
  if (after.is_same(before) && before.defined() == state.had_grad) return;
  Given given{.leaf = leaf};
  if (after.defined()) {
    given.value = recorder.find(part_of(after));
    given.spec = spec_of(after);
    const Value& value = recorder.graph().value(given.value);
    if (is_kept(recorder, after, value)) given.kept = after;
    if (value.kind == ValueKind::computed) given.version = version_of(after);
    if (is_added && !given.spec) count_from_input(recorder, value, input, given);
    recorder.graph().gradients().push_back({meta_of(leaf.tensor.lock()).to_string(), given.value});
  }
  given_.push_back(std::move(given));
}

// A tensor and its aliases have one version between them.
void Effects::count_from_input(const Recorder& recorder, const Value& value, int input, Given& given) const {
  for (const OuterTensor& outer : recorder.outer_tensors()) {
    if (outer.input != input || recorder.value(outer.value).storage != value.storage) continue;
    given.alias_of = input;
    given.version -= outer.version;
    return;
  }
}

int Effects::add_input(Recorder& recorder, const Leaf& leaf, const GradientState& state,
                       const std::set<int32_t>& shared) {
  const at::Tensor part = state.remaining_part();
  const ValueId id = recorder.find_known(part);
  if (id == kNoValue || !is_exchangeable(recorder.graph().value(id), state, shared)) return -1;
  std::vector<WeakTensor> sharers = sharers_of(recorder, id, state, leaf.tensor.lock().grad());
  added_.push_back({leaf, meta_of(part), state.spec, std::move(sharers), state.num_handles});
  recorder.make_input(id, part);
  return int(first_added_ + added_.size()) - 1;
}

void Effects::drop_unused(Graph& graph) {
  for (size_t k = 0; k < added_.size(); ++k) {
    ValueId& id = graph.inputs().at(first_added_ + k);
    if (is_used(graph, id)) continue;
    id = kNoValue;
    added_[k].is_used = false;
  }
}

void Effects::add_bump(const OuterTensor& outer) {
  const at::Tensor t = outer.tensor.lock();
  if (!t.defined() || version_of(t) == outer.version) return;
  if (outer.input < 0 && !outer.is_of_surroundings()) return;
  bumped_.push_back({.tensor = t,
                     .count = version_of(t) - outer.version,
                     .input = outer.input,
                     .is_part = dtensor_meta(t) == nullptr});
}

void Effects::add_shared(const Leaf& leaf, const GradientState& state, const std::vector<at::Tensor>& arguments) {
  const at::Tensor grad = state.part.lock();
  if (!grad.defined()) return;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (storage_of(arguments[i]) != storage_of(grad)) continue;
    shared_.push_back({leaf, i, byte_offset_of(grad) - byte_offset_of(arguments[i])});
  }
}

bool Effects::Shared::holds(const std::vector<at::Tensor>& arguments) const {
  const at::Tensor t = leaf.in(arguments);
  if (!t.defined() || !t.grad().defined() || storage_of(t.grad()) != storage_of(arguments[argument])) return false;
  return byte_offset_of(t.grad()) - byte_offset_of(arguments[argument]) == distance;
}

bool Effects::Expected::holds(const std::vector<at::Tensor>& arguments) const {
  const at::Tensor t = leaf.in(arguments);
  return t.defined() && t.grad().defined() == is_defined &&
         (!is_defined || t.grad().unsafeGetTensorImpl() == grad.address());
}

bool Effects::Added::holds(const std::vector<at::Tensor>& arguments) const {
  if (!is_used) return true;
  const at::Tensor t = leaf.in(arguments);
  if (!t.defined() || !t.grad().defined() || spec_of(t.grad()) != spec) return false;
  if (!is_held_as_before(t.grad())) return false;  // first: the part is one more handle
  const at::Tensor part = part_of(t.grad());
  return part.layout() == at::kStrided && part.sizes() == c10::IntArrayRef(meta.sizes) &&
         part.strides() == c10::IntArrayRef(meta.strides) && part.scalar_type() == meta.dtype;
}

bool Effects::Added::is_held_as_before(const at::Tensor& grad) const {
  if (num_handles > 1 && num_handles_of(grad) != num_handles) return false;
  return std::all_of(sharers.begin(), sharers.end(), [&](const WeakTensor& sharer) {
    const at::Tensor other = sharer.lock();
    return storage_of(other) == storage_of(grad) && byte_offset_of(other) == byte_offset_of(grad);
  });
}

bool Effects::hold(const std::vector<at::Tensor>& arguments) const {
  const auto holds = [&](const auto& condition) { return condition.holds(arguments); };
  return std::all_of(expected_.begin(), expected_.end(), holds) && std::all_of(added_.begin(), added_.end(), holds) &&
         std::all_of(shared_.begin(), shared_.end(), holds);
}

std::string Effects::why_not(const std::vector<at::Tensor>& arguments) const {
  const auto text = [&](const Leaf& leaf, bool was_defined) -> std::string {
    const at::Tensor parameter = leaf.in(arguments);
    if (!parameter.defined()) return "a parameter of the step is gone";
    const std::string gradient = "gradient of the parameter " + meta_of(parameter).to_string();
    if (!was_defined) return gradient + " was undefined before the call and is defined";
    return gradient + (parameter.grad().defined() ? " is another tensor than before" : " was defined and is undefined");
  };
  for (const Expected& expected : expected_) {
    if (!expected.holds(arguments)) return text(expected.leaf, expected.is_defined);
  }
  for (const Added& added : added_) {
    if (added.holds(arguments)) continue;
    const at::Tensor parameter = added.leaf.in(arguments);
    const bool is_there = parameter.defined() && parameter.grad().defined();
    if (!is_there || added.is_held_as_before(parameter.grad())) return text(added.leaf, true);
    return "gradient of the parameter " + meta_of(parameter).to_string() + " is held by others than before";
  }
  for (const Shared& shared : shared_) {
    if (!shared.holds(arguments)) return text(shared.leaf, true);
  }
  return "";
}

std::vector<at::Tensor> Effects::inputs_of(const std::vector<at::Tensor>& arguments) const {
  std::vector<at::Tensor> inputs = arguments;
  for (const Added& added : added_) {
    inputs.push_back(added.is_used ? added.leaf.in(arguments).grad() : at::Tensor());
  }
  return inputs;
}

void Effects::free_gradients(const std::vector<at::Tensor>& inputs) const {
  for (const Given& given : given_) {
    if (given.value == kNoValue || given.kept.defined()) continue;
    const at::Tensor parameter = given.leaf.in(inputs);
    if (parameter.defined()) parameter.mutable_grad().reset();
  }
}

void Effects::drop_gradients(const std::vector<at::Tensor>& inputs) const {
  const auto drop = [&](const Leaf& leaf) {
    const at::Tensor parameter = leaf.in(inputs);
    if (parameter.defined()) parameter.mutable_grad().reset();
  };
  for (const Given& given : given_) drop(given.leaf);
  for (const Expected& expected : expected_) drop(expected.leaf);
}

void Effects::apply(const Program& program, const std::vector<at::Tensor>& inputs) const {
  give(program, inputs);
  bump(inputs);
}

void Effects::give(const Program& program, const std::vector<at::Tensor>& inputs) const {
  for (const Given& given : given_) {
    const at::Tensor parameter = given.leaf.in(inputs);
    if (!parameter.defined()) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (given.kept.defined()) {
      grad = given.kept;
    } else if (given.value == kNoValue) {
      grad.reset();
    } else {
      const at::Tensor part = program.value(given.value);
      grad = given.spec ? wrap(part, given.spec) : part;
      if (given.spec && detail::gather_of(parameter) != nullptr) set_use(grad, detail::use_like_parameters());
      raise_version(grad,
                    given.version + (given.alias_of < 0 ? 0 : version_of(part_of(inputs[size_t(given.alias_of)]))));
    }
  }
}

at::Tensor Effects::Bumped::in(const std::vector<at::Tensor>& inputs) const {
  const at::Tensor t = input < 0 ? tensor.lock() : inputs[size_t(input)];
  return t.defined() && is_part ? part_of(t) : t;
}

// All versions are read before any is raised: a tensor and its views have one between them.
void Effects::bump(const std::vector<at::Tensor>& inputs) const {
  std::vector<std::pair<at::Tensor, uint32_t>> raised;
  for (const Bumped& bumped : bumped_) {
    const at::Tensor t = bumped.in(inputs);
    if (t.defined()) raised.emplace_back(t, version_of(t) + bumped.count);
  }
  for (const auto& [t, version] : raised) raise_version(t, version);
}

}  // namespace serried::graph
