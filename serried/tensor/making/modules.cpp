// Stock torch::nn modules on a mesh: their parameters become DTensors in place.
#include "serried/tensor/making/modules.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/library_hook.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/tensor/making/joined_sums.h"
#include "serried/tensor/making/unchecked.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

void check_same(const at::Tensor& parameter, const DeviceMesh& mesh, const Placements& placements) {
  const Spec& spec = *dtensor_meta(parameter)->spec;
  if (mesh == spec.mesh && placements == spec.placements) return;
  raise<c10::ValueError>({"distribute_parameter",
                          c10::str("the parameter is already distributed: ", spec.to_string(), ", not \"",
                                   to_string(placements), "\" on ", mesh.to_string()),
                          "distribute a parameter once, in its final placements"});
}

void convert(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements) {
  const c10::DimVector sizes(plain.sizes().begin(), plain.sizes().end());
  at::Tensor part = detail::distributed_part("distribute_parameter", plain, mesh, placements, 0);
  SpecPtr spec = spec_of_result(part, mesh, placements, sizes);
  convert_in_place(plain, std::move(part), std::move(spec));
}

// Optimizers keep state beside the parameter: a gradient placed otherwise would be moved at every step anyway.
void bring_gradients_home(const at::Tensor& parameter) {
  const auto home = [placements = dtensor_meta(parameter)->spec->placements,
                     self = WeakTensor(parameter)](const at::Tensor& grad) {
    if (!is_dtensor(grad)) return grad;
    // Who gathers the parameter brings its gradients home, those of a block together; hooks of users see them whole.
    const at::Tensor of = self.lock();
    const bool is_gathered = of.defined() && detail::gather_of(of) != nullptr;
    if (is_gathered && !detail::is_towards_chosen_tensors() && num_user_hooks(of) == 0) return grad;
    if (detail::sum_up_later(self, grad, placements)) return grad;
    return at::Tensor(DTensor(grad).redistribute(placements));
  };
  change_gradient_of(parameter, home);
}

// Which modules went through distribute_module: known by their first tensor, since an address may be used again.
class SeenModules {
 public:
  /// False where `module` was added before.
  bool add(const torch::nn::Module& module, const at::Tensor& first) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(seen_, [](const auto& entry) { return entry.second.expired(); });
    const auto [it, is_new] = seen_.try_emplace(&module, first.getIntrusivePtr());
    if (is_new) return true;
    const bool is_same = it->second._unsafe_get_target() == first.unsafeGetTensorImpl();
    it->second = c10::weak_intrusive_ptr<c10::TensorImpl>(first.getIntrusivePtr());
    return !is_same;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, c10::weak_intrusive_ptr<c10::TensorImpl>> seen_;
};

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& t : module.parameters()) tensors.push_back(t);
  for (const at::Tensor& t : module.buffers()) tensors.push_back(t);
  std::erase_if(tensors, [](const at::Tensor& t) { return !t.defined(); });
  return tensors;
}

void check_first_time(const torch::nn::Module& module) {
  static SeenModules seen;
  const std::vector<at::Tensor> tensors = tensors_of(module);
  if (tensors.empty() || seen.add(module, tensors.front())) return;
  raise<c10::ValueError>({"distribute_module", c10::str("the module ", module.name(), " is already distributed"),
                          "call it once per module; distribute_parameter works on single parameters"});
}

void for_each_module(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh,
                     const PartitionFn& partition) {
  partition(name, module, mesh);
  for (const auto& child : module.named_children()) {
    for_each_module(name.empty() ? child.key() : name + "." + child.key(), *child.value(), mesh, partition);
  }
}

// New data would come without what a strategy has left on the parameter.
void check_unmarked(const at::Tensor& self) {
  const DTensorMeta* meta = self.defined() ? dtensor_meta(self) : nullptr;
  if (meta == nullptr || meta->use == nullptr || meta->use->layouts == nullptr) return;
  raise<c10::NotImplementedError>(
      {"set_data", meta->spec->to_string() + " has a style, which new data would not have",
       "convert the module before parallelize_module, or write values into the parameter: copy_ under a NoGradGuard"});
}

// A copy would have no block that gathers it and averages its gradient.
void check_not_gathered(const at::Tensor& t) {
  if (detail::gather_of(t) == nullptr) return;
  raise<c10::ValueError>({"set_data",
                          "the parameter is fully sharded: its memory is part of a block, and set_data(), which the "
                          "module's clone() and to() call, would take it out",
                          "clone or convert the module before fully_shard; to change values use parameter.copy_(x)"});
}

// clone() makes a fresh module and gives each plain parameter the data of the original's copy through set_data, which
// asks this. A plain tensor may become a DTensor of the same sizes and dtype, as in distribute_parameter; never the
// other way round, which would drop the other ranks' parts.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  if (!self.is_same(from)) check_unmarked(self);
  check_not_gathered(self);
  check_not_gathered(from);
  if (self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set())) return true;
  return dtensor_meta(from) != nullptr && dtensor_meta(self) == nullptr && self.defined() && self.device().is_cpu() &&
         self.layout() == at::kStrided && self.sizes() == from.sizes() && self.scalar_type() == from.scalar_type();
}

}  // namespace

void distribute_parameter(const at::Tensor& parameter, const DeviceMesh& mesh, const Placements& placements) {
  constexpr const char* kWhere = "distribute_parameter";
  if (!parameter.defined()) {
    raise<c10::ValueError>({kWhere, "the parameter is undefined", "pass a parameter that the module has"});
  }
  const Placements placed =
      detail::resolved_placements(kWhere, placements, parameter.dim(), mesh, parameter.scalar_type());
  if (is_dtensor(parameter)) return check_same(parameter, mesh, placed);
  if (!parameter.is_leaf()) {
    raise<c10::ValueError>({kWhere,
                            watch::describe_tensor(parameter) + " is the result of an op that autograd recorded",
                            "pass the parameter itself, or use DTensor::from_local, which is differentiable"});
  }
  detail::check_in_mesh(kWhere, mesh);
  const at::Tensor grad = parameter.grad();
  convert(parameter, mesh, placed);
  if (grad.defined() && !is_dtensor(grad)) convert(grad, mesh, detail::gradient_placements(placed));
  if (parameter.requires_grad()) bring_gradients_home(parameter);
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition) {
  check_first_time(module);
  if (partition) for_each_module("", module, mesh, partition);
  for (const at::Tensor& t : tensors_of(module)) {
    if (!is_dtensor(t)) distribute_parameter(t, mesh);
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

}  // namespace serried
