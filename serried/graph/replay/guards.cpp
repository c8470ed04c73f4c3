// Checks guards fast, and says slowly what failed.
#include "serried/graph/replay/guards.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "serried/graph/record/compare.h"
#include "serried/graph/record/hooks.h"
#include "serried/graph/text/plain_value.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/meta.h"

namespace serried::graph {
namespace {

std::string text_of(const c10::DimVector& sizes) {
  return c10::str(c10::IntArrayRef(sizes));
}

const char* on_off(bool on) {
  return on ? "on" : "off";
}

// Whether it is a DTensor that no op takes any more: a copied view whose base was written. Recorded, it raises.
bool is_stale(const DTensorMeta* dtensor) {
  return dtensor != nullptr && dtensor->copied_from != nullptr && dtensor->copied_from->has_changed();
}

// Others are refused when they are recorded.
bool is_strided(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_nested();
}

// Also a part of it under another name, as from_blob() gives.
bool has_memory(const at::Tensor& t, const c10::StorageImpl* storage) {
  const c10::StorageImpl* own = storage_of(t);
  return storage != nullptr && own != nullptr && overlap(*own, *storage);
}

int64_t distance_between(const CallArguments& arguments, size_t i, int other) {
  return other < 0 ? 0 : byte_offset_of(arguments.tensors[i]) - byte_offset_of(arguments.tensors[size_t(other)]);
}

InputFacts facts_of(const CallArguments& arguments, size_t i) {
  const at::Tensor& t = arguments.tensors[i];
  InputFacts facts;
  if (!t.defined()) return facts;
  facts.is_defined = true;
  if (!is_strided(t)) return facts;
  facts.meta = meta_of(t);
  facts.requires_grad = t.requires_grad();
  facts.is_leaf = t.is_leaf();
  const DTensorMeta* dtensor = dtensor_meta(t);
  if (dtensor != nullptr) facts.spec = dtensor->spec;
  facts.is_stale = is_stale(dtensor);
  const c10::StorageImpl* storage = storage_of(t);
  for (size_t k = i; k-- > 0;) {
    if (arguments.tensors[k].is_same(t)) facts.same_as = int(k);
    if (has_memory(arguments.tensors[k], storage)) facts.shares_with = int(k);
  }
  facts.distance = distance_between(arguments, i, facts.shares_with);
  return facts;
}

// A pass may change the order of what touches different memory.
bool is_apart_as(const InputFacts& facts, const CallArguments& arguments, size_t i) {
  const at::Tensor& t = arguments.tensors[i];
  const c10::StorageImpl* storage = storage_of(t);
  int same_as = -1, shares_with = -1;
  for (size_t k = i; k-- > 0;) {
    if (arguments.tensors[k].is_same(t)) same_as = int(k);
    if (has_memory(arguments.tensors[k], storage)) shares_with = int(k);
  }
  return same_as == facts.same_as && shares_with == facts.shares_with &&
         distance_between(arguments, i, shares_with) == facts.distance;
}

bool same_input(const InputFacts& facts, const CallArguments& arguments, size_t i) {
  const at::Tensor& t = arguments.tensors[i];
  if (t.defined() != facts.is_defined) return false;
  if (!t.defined()) return true;
  if (!is_strided(t) || t.sizes() != c10::IntArrayRef(facts.meta.sizes)) return false;
  if (t.scalar_type() != facts.meta.dtype || t.strides() != c10::IntArrayRef(facts.meta.strides)) return false;
  if (t.device() != facts.meta.device || t.requires_grad() != facts.requires_grad) return false;
  if (facts.requires_grad && (t.is_leaf() != facts.is_leaf || num_user_hooks(t) > 0)) return false;
  if (t.is_conj() || t.is_neg()) return false;
  const DTensorMeta* dtensor = dtensor_meta(t);
  if ((dtensor != nullptr ? dtensor->spec.get() : nullptr) != facts.spec.get() || is_stale(dtensor)) return false;
  return is_apart_as(facts, arguments, i);
}

std::string spec_text(const SpecPtr& spec) {
  return spec ? spec->to_string() : "plain";
}

std::string changed(const std::string& what, const std::string& before, const std::string& now) {
  return what + " was " + before + " and is " + now;
}

std::string input_difference(size_t i, const InputFacts& before, const InputFacts& now) {
  const std::string input = "input " + std::to_string(i);
  if (before.is_defined != now.is_defined) {
    return changed(input, before.is_defined ? "defined" : "undefined", now.is_defined ? "defined" : "undefined");
  }
  if (before.meta.dtype != now.meta.dtype) {
    return changed("dtype of " + input, c10::toString(before.meta.dtype), c10::toString(now.meta.dtype));
  }
  if (before.meta.device != now.meta.device) {
    return changed("device of " + input, before.meta.device.str(), now.meta.device.str());
  }
  if (before.meta.sizes != now.meta.sizes) {
    return changed("shape of " + input, text_of(before.meta.sizes), text_of(now.meta.sizes));
  }
  // Behind what a layout says as well.
  if (spec_text(before.spec) != spec_text(now.spec)) {
    return changed("placement of " + input, spec_text(before.spec), spec_text(now.spec));
  }
  if (before.meta.strides != now.meta.strides) {
    return changed("strides of " + input, text_of(before.meta.strides), text_of(now.meta.strides));
  }
  if (before.spec.get() != now.spec.get()) return "mesh of " + input + " was re-created: " + spec_text(before.spec);
  if (before.requires_grad != now.requires_grad) {
    return changed("requires_grad of " + input, on_off(before.requires_grad), on_off(now.requires_grad));
  }
  if (before.is_leaf != now.is_leaf) {
    return changed(input, before.is_leaf ? "a leaf" : "no leaf", now.is_leaf ? "a leaf" : "no leaf");
  }
  const auto other = [](int k, const char* none) { return k < 0 ? none : "input " + std::to_string(k); };
  if (before.same_as != now.same_as) {
    return changed(input, other(before.same_as, "a tensor of its own"), other(now.same_as, "a tensor of its own"));
  }
  if (before.shares_with != now.shares_with) {
    return changed("memory of " + input, other(before.shares_with, "its own"), other(now.shares_with, "its own"));
  }
  if (before.distance != now.distance) {
    return c10::str(input, " lay ", before.distance, " bytes behind ", other(before.shares_with, ""), " and lies ",
                    now.distance, " bytes behind it");
  }
  if (now.is_stale) return input + " is a copied view whose base was written";
  return input + " came with a hook on its gradient";
}

std::string fact_text(const tape::Fact& fact, uint64_t value) {
  return fact.text != nullptr ? fact.text(value) : std::to_string(value);
}

template <class Live, class Weak>
bool all_live(const std::vector<Live>& lives, Weak Live::*weak) {
  return std::none_of(lives.begin(), lives.end(), [&](const Live& live) { return (live.*weak).expired(); });
}

bool all_live(const std::vector<WeakGenerator>& generators) {
  return std::none_of(generators.begin(), generators.end(), [](const auto& weak) { return weak.expired(); });
}

std::string group_text(const c10d::ProcessGroup* group) {
  return group == nullptr ? "none" : group->getGroupName();
}

std::string ambient_difference(const Ambient& before, const Ambient& now) {
  if (before.grad_mode != now.grad_mode) return changed("grad mode", on_off(before.grad_mode), on_off(now.grad_mode));
  if (before.inference_mode != now.inference_mode) {
    return changed("inference mode", on_off(before.inference_mode), on_off(now.inference_mode));
  }
  if (before.autocast != now.autocast) return changed("autocast", on_off(before.autocast), on_off(now.autocast));
  if (before.autocast_dtype != now.autocast_dtype) {
    return changed("autocast dtype", c10::toString(before.autocast_dtype), c10::toString(now.autocast_dtype));
  }
  if (before.default_dtype != now.default_dtype) {
    return changed("default dtype", c10::toString(before.default_dtype), c10::toString(now.default_dtype));
  }
  if (before.deterministic != now.deterministic) {
    return changed("deterministic algorithms", on_off(before.deterministic), on_off(now.deterministic));
  }
  if (before.mesh != now.mesh) return changed("current mesh", std::to_string(before.mesh), std::to_string(now.mesh));
  return "the current process group is another one" + std::string(now.group == nullptr ? ": none" : "");
}

// Storages are looked up by address; where torch does not own the memory bounds are compared.
bool is_before(const c10::Storage& a, const c10::StorageImpl* b) {
  return a.unsafeGetStorageImpl() < b;
}

// Gradients that a graph adds to had memory of their own.
bool are_gradients_apart(const std::vector<at::Tensor>& inputs, size_t num_arguments) {
  std::vector<const c10::StorageImpl*> gradients;
  for (size_t i = num_arguments; i < inputs.size(); ++i) {
    if (inputs[i].defined()) gradients.push_back(storage_of(inputs[i]));
  }
  std::sort(gradients.begin(), gradients.end());
  if (std::adjacent_find(gradients.begin(), gradients.end()) != gradients.end()) return false;
  return std::none_of(inputs.begin(), inputs.begin() + int64_t(num_arguments), [&](const at::Tensor& argument) {
    return std::binary_search(gradients.begin(), gradients.end(), storage_of(argument));
  });
}

}  // namespace

Ambient Ambient::here() {
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  const std::optional<DeviceMesh> mesh = current_mesh();
  return {c10::GradMode::is_enabled(),
          c10::InferenceMode::is_enabled(),
          autocast,
          autocast ? at::autocast::get_autocast_dtype(at::kCPU) : at::kFloat,
          c10::get_default_dtype_as_scalartype(),
          at::globalContext().deterministicAlgorithms(),
          current_process_group().get(),
          mesh ? mesh->id() : 0};
}

CallGuards::CallGuards(const CallArguments& arguments)
    : types_(arguments.types), constants_(arguments.constants), watched_(arguments.watched), ambient_(Ambient::here()) {
  for (size_t i = 0; i < arguments.tensors.size(); ++i) inputs_.push_back(facts_of(arguments, i));
}

bool CallGuards::hold(const CallArguments& arguments) const {
  if (arguments.tensors.size() != inputs_.size() || arguments.constants != constants_) return false;
  if (arguments.types != types_ || arguments.watched != watched_) return false;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!same_input(inputs_[i], arguments, i)) return false;
  }
  return Ambient::here() == ambient_;
}

std::string CallGuards::why_not(const CallArguments& arguments) const {
  if (arguments.tensors.size() != inputs_.size()) {
    return changed("number of input tensors", std::to_string(inputs_.size()), std::to_string(arguments.tensors.size()));
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!same_input(inputs_[i], arguments, i)) return input_difference(i, inputs_[i], facts_of(arguments, i));
  }
  for (size_t i = 0; i < std::min(constants_.size(), arguments.constants.size()); ++i) {
    if (constants_[i] == arguments.constants[i]) continue;
    return changed("argument value " + std::to_string(i), constants_[i], arguments.constants[i]);
  }
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (watched_[i] == arguments.watched[i]) continue;
    if (watched_[i].text == arguments.watched[i].text) return *watched_[i].name + " is another one at the same address";
    return changed(*watched_[i].name, watched_[i].text, arguments.watched[i].text);
  }
  if (arguments.types != types_) return "arguments were of other types";
  const Ambient now = Ambient::here();
  return now == ambient_ ? "" : ambient_difference(ambient_, now);
}

std::vector<Guard> CallGuards::list() const {
  std::vector<Guard> guards;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const std::string input = "input " + std::to_string(i);
    if (!inputs_[i].is_defined) {
      guards.push_back({input, "undefined"});
      continue;
    }
    guards.push_back({input, inputs_[i].meta.to_string()});
    guards.push_back({"strides of " + input, text_of(inputs_[i].meta.strides)});
    guards.push_back({"placement of " + input, spec_text(inputs_[i].spec)});
    guards.push_back({"requires_grad of " + input, on_off(inputs_[i].requires_grad)});
  }
  for (size_t i = 0; i < constants_.size(); ++i) {
    guards.push_back({"argument value " + std::to_string(i), constants_[i]});
  }
  for (const WatchedText& variable : watched_) guards.push_back({*variable.name, variable.text});
  guards.push_back({"grad mode", on_off(ambient_.grad_mode)});
  guards.push_back({"inference mode", on_off(ambient_.inference_mode)});
  guards.push_back({"autocast", on_off(ambient_.autocast)});
  guards.push_back({"default dtype", c10::toString(ambient_.default_dtype)});
  guards.push_back({"deterministic algorithms", on_off(ambient_.deterministic)});
  guards.push_back({"current process group", ambient_.group == nullptr ? "none" : group_text(ambient_.group)});
  return guards;
}

StateGuards::StateGuards(const Recording& replayable) {
  for (const OuterTensor& outer : replayable.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!t.defined() || outer.value == kNoValue || !outer.is_of_surroundings()) continue;
    const ValueKind kind = replayable.graph.value(outer.value).kind;
    if (kind == ValueKind::constant) continue;
    tensors_.push_back({t, outer.place, t.requires_grad(), history_of(t), meta_of(t).to_string()});
  }
  for (const Group& group : replayable.groups) {
    groups_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), plain_text(group)});
  }
  generators_ = replayable.generators;
  objects_ = replayable.objects;
  facts_ = replayable.facts;
}

bool StateGuards::FoundTensor::is_there() const {
  const at::Tensor t = tensor.lock();
  return t.defined() && place.holds(t) && t.requires_grad() == requires_grad && has_history(t, history) &&
         !is_stale(dtensor_meta(t));
}

std::string StateGuards::FoundTensor::why_not() const {
  const at::Tensor t = tensor.lock();
  if (!t.defined()) return "the tensor " + text + " that the step used is gone";
  if (t.requires_grad() != requires_grad) {
    return changed("requires_grad of " + text, on_off(requires_grad), on_off(t.requires_grad()));
  }
  if (is_stale(dtensor_meta(t))) return "the tensor " + text + " is a copied view whose base was written";
  if (!has_history(t, history)) return "the tensor " + text + " has another history than when recorded";
  if (storage_of(t) == place.storage) return "the tensor " + text + " lies otherwise in its memory than when recorded";
  return "the tensor " + text + " has other memory than when recorded";
}

bool StateGuards::hold() const {
  return std::all_of(tensors_.begin(), tensors_.end(), [](const FoundTensor& found) { return found.is_there(); }) &&
         all_live(groups_, &LiveGroup::group) && all_live(objects_, &LiveObject::object) && all_live(generators_) &&
         all_hold(facts_);
}

bool StateGuards::may_hold_again() const {
  return std::all_of(tensors_.begin(), tensors_.end(),
                     [](const FoundTensor& found) { return found.tensor.lock().defined(); }) &&
         all_live(groups_, &LiveGroup::group) && all_live(objects_, &LiveObject::object) && all_live(generators_);
}

std::string StateGuards::why_not() const {
  for (const FoundTensor& found : tensors_) {
    if (!found.is_there()) return found.why_not();
  }
  for (const LiveGroup& live : groups_) {
    if (live.group.expired()) return "the group " + live.text + " is gone";
  }
  for (const LiveObject& live : objects_) {
    if (live.object.expired()) return live.name + " is gone";
  }
  if (!all_live(generators_)) return "a generator that the step drew from is gone";
  for (const auto& [fact, value] : facts_) {
    const uint64_t now = fact.value();
    if (now != value) return changed(fact.name, fact_text(fact, value), fact_text(fact, now));
  }
  return "";
}

std::vector<Guard> StateGuards::list() const {
  std::vector<Guard> guards;
  for (const FoundTensor& found : tensors_) guards.push_back({"tensor " + found.text, "the same memory"});
  for (const LiveGroup& group : groups_) guards.push_back({"group", group.text});
  for (const LiveObject& live : objects_) guards.push_back({live.name, "still there"});
  for (const auto& [fact, value] : facts_) guards.push_back({fact.name, fact_text(fact, value)});
  return guards;
}

Sharing::Sharing(const Recording& replayable) : inputs_(replayable.inputs) {
  for (const Value& value : replayable.graph.values()) {
    if (!is_from_outside(value)) continue;
    surroundings_.push_back(value.tensor.storage());
    all_allocated_ &= is_allocated(*storage_of(value.tensor));
  }
  std::sort(surroundings_.begin(), surroundings_.end(),
            [](const c10::Storage& a, const c10::Storage& b) { return is_before(a, b.unsafeGetStorageImpl()); });
}

bool Sharing::is_of_surroundings(const c10::StorageImpl* storage) const {
  if (storage == nullptr) return false;
  const auto found = std::lower_bound(surroundings_.begin(), surroundings_.end(), storage, is_before);
  if (found != surroundings_.end() && found->unsafeGetStorageImpl() == storage) return true;
  if (all_allocated_ && is_allocated(*storage)) return false;
  return std::any_of(surroundings_.begin(), surroundings_.end(),
                     [&](const c10::Storage& other) { return overlap(*storage, *other.unsafeGetStorageImpl()); });
}

bool Sharing::are_in_place(const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && !inputs_[i].allows(inputs[i])) return false;
  }
  return true;
}

bool Sharing::holds(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  if (!are_in_place(inputs)) return false;
  for (const at::Tensor& input : inputs) {
    if (is_of_surroundings(storage_of(input))) return false;
  }
  return inputs.size() == num_arguments || are_gradients_apart(inputs, num_arguments);
}

bool Sharing::fails_by_place(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  return !are_in_place(inputs) && are_gradients_apart(inputs, num_arguments) &&
         std::none_of(inputs.begin(), inputs.end(),
                      [&](const at::Tensor& input) { return is_of_surroundings(storage_of(input)); });
}

std::string Sharing::why_not(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  const auto name = [&](size_t i) {
    return i < num_arguments ? "input " + std::to_string(i) : "a gradient that the function adds to";
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    if (is_of_surroundings(storage_of(inputs[i]))) {
      return "memory of " + name(i) + " was its own and is that of a tensor the function uses";
    }
    if (!inputs_[i].allows(inputs[i])) return name(i) + " was one tensor in all recordings and is another one";
  }
  return are_gradients_apart(inputs, num_arguments) ? ""
                                                    : "a gradient that the function adds to has no memory of its own";
}

}  // namespace serried::graph
