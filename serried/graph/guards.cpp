// Checks guards fast, and says slowly what failed.
#include "serried/graph/guards.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "serried/mesh/mesh.h"
#include "serried/tensor/meta.h"

namespace serried::graph {
namespace {

std::string text_of(const c10::DimVector& sizes) {
  return c10::str(c10::IntArrayRef(sizes));
}

const char* on_off(bool on) {
  return on ? "on" : "off";
}

InputFacts facts_of(const CallArguments& arguments, size_t i) {
  const at::Tensor& t = arguments.tensors[i];
  InputFacts facts;
  if (!t.defined()) return facts;
  facts.is_defined = true;
  facts.meta = meta_of(t);
  facts.requires_grad = t.requires_grad();
  const DTensorMeta* dtensor = dtensor_meta(t);
  if (dtensor != nullptr) facts.spec = dtensor->spec;
  for (size_t k = 0; k < i && facts.same_as < 0; ++k) {
    if (arguments.tensors[k].is_same(t)) facts.same_as = int(k);
  }
  return facts;
}

bool same_input(const InputFacts& facts, const CallArguments& arguments, size_t i) {
  const at::Tensor& t = arguments.tensors[i];
  if (t.defined() != facts.is_defined) return false;
  if (!t.defined()) return true;
  if (t.sizes() != c10::IntArrayRef(facts.meta.sizes) || t.scalar_type() != facts.meta.dtype) return false;
  if (t.layout() != at::kStrided || t.strides() != c10::IntArrayRef(facts.meta.strides)) return false;
  if (t.device() != facts.meta.device || t.requires_grad() != facts.requires_grad) return false;
  if (t.is_conj() || t.is_neg()) return false;
  const DTensorMeta* dtensor = dtensor_meta(t);
  if ((dtensor != nullptr ? dtensor->spec.get() : nullptr) != facts.spec.get()) return false;
  for (size_t k = 0; k < i; ++k) {
    if (arguments.tensors[k].is_same(t)) return facts.same_as == int(k);
  }
  return facts.same_as < 0;
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
  if (spec_text(before.spec) != spec_text(now.spec)) {
    return changed("placement of " + input, spec_text(before.spec), spec_text(now.spec));
  }
  if (before.spec.get() != now.spec.get() && before.meta.sizes == now.meta.sizes) {
    return "mesh of " + input + " was re-created: " + spec_text(before.spec);
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
  if (before.meta.strides != now.meta.strides) {
    return changed("strides of " + input, text_of(before.meta.strides), text_of(now.meta.strides));
  }
  if (before.requires_grad != now.requires_grad) {
    return changed("requires_grad of " + input, on_off(before.requires_grad), on_off(now.requires_grad));
  }
  const auto same = [](int k) { return k < 0 ? std::string("a tensor of its own") : "input " + std::to_string(k); };
  return changed(input, same(before.same_as), same(now.same_as));
}

std::string witness_text(const Witness& witness, uint64_t value) {
  return witness.text != nullptr ? witness.text(value) : std::to_string(value);
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

const void* memory_of(const c10::TensorImpl* impl) {
  if (const DTensorMeta* dtensor = dtensor_meta(impl)) return dtensor->local.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->storage().unsafeGetStorageImpl() : static_cast<const void*>(impl);
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
    : constants_(arguments.constants), watched_(arguments.watched), ambient_(Ambient::here()) {
  for (size_t i = 0; i < arguments.tensors.size(); ++i) inputs_.push_back(facts_of(arguments, i));
}

bool CallGuards::hold(const CallArguments& arguments) const {
  if (arguments.tensors.size() != inputs_.size() || arguments.constants != constants_) return false;
  if (arguments.watched != watched_) return false;
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
    return changed(*watched_[i].name, watched_[i].text, arguments.watched[i].text);
  }
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

StateGuards::StateGuards(const Recording& settled) {
  for (const Resident& resident : settled.residents) {
    const at::Tensor t = resident.tensor.lock();
    if (!t.defined() || resident.value == kNoValue) continue;
    if (settled.graph.value(resident.value).kind != ValueKind::persistent) continue;
    tenants_.push_back({t, memory_of(t.unsafeGetTensorImpl()), t.requires_grad(), meta_of(t).to_string()});
  }
  for (const Group& group : settled.groups) {
    groups_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
                       c10::str(group->getGroupName(), ", rank ", group->getRank(), "/", group->getSize())});
  }
  for (const Witness& witness : settled.witnesses) reported_.push_back({witness, witness.value()});
}

int StateGuards::failing() const {
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const at::Tensor t = tenants_[i].tensor.lock();
    if (!t.defined() || memory_of(t.unsafeGetTensorImpl()) != tenants_[i].memory ||
        t.requires_grad() != tenants_[i].requires_grad) {
      return int(i);
    }
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].group.expired()) return int(tenants_.size() + i);
  }
  for (size_t i = 0; i < reported_.size(); ++i) {
    if (reported_[i].witness.value() != reported_[i].value) return int(tenants_.size() + groups_.size() + i);
  }
  return -1;
}

std::string StateGuards::why_not() const {
  const int failed = failing();
  if (failed < 0) return "";
  size_t i = size_t(failed);
  if (i < tenants_.size()) {
    const at::Tensor t = tenants_[i].tensor.lock();
    if (!t.defined()) return "the tensor " + tenants_[i].text + " that the step used is gone";
    if (t.requires_grad() != tenants_[i].requires_grad) {
      return changed("requires_grad of " + tenants_[i].text, on_off(tenants_[i].requires_grad),
                     on_off(t.requires_grad()));
    }
    return "the tensor " + tenants_[i].text + " has other memory than when recorded";
  }
  i -= tenants_.size();
  if (i < groups_.size()) return "the group " + groups_[i].text + " is gone";
  const Reported& reported = reported_[i - groups_.size()];
  return changed(reported.witness.name, witness_text(reported.witness, reported.value),
                 witness_text(reported.witness, reported.witness.value()));
}

std::vector<Guard> StateGuards::list() const {
  std::vector<Guard> guards;
  for (const Tenant& tenant : tenants_) guards.push_back({"tensor " + tenant.text, "the same memory"});
  for (const LiveGroup& group : groups_) guards.push_back({"group", group.text});
  for (const Reported& reported : reported_) {
    guards.push_back({reported.witness.name, witness_text(reported.witness, reported.value)});
  }
  return guards;
}

}  // namespace serried::graph
