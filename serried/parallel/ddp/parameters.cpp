// Walks the module tree, and goes between parameters that are DTensors and the plain memory of buckets.
#include "serried/parallel/ddp/parameters.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/making/placing.h"

namespace serried::detail {
namespace {

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

bool makes_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

class Collector {
 public:
  explicit Collector(const std::set<std::string>& ignored) : ignored_(ignored) {}

  void visit(const torch::nn::Module& module, const std::string& path) {
    const std::string owner = (path.empty() ? "the module" : path) + " (" + module.name() + ")";
    const bool sparse = makes_sparse_gradients(module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      add({item.value(), joined(path, item.key()), owner, sparse});
    }
    for (const auto& item : module.named_children()) visit(*item.value(), joined(path, item.key()));
  }

  std::vector<ManagedParameter> take() { return std::move(found_); }

 private:
  void add(ManagedParameter parameter) {
    if (ignored_.count(parameter.name) != 0 || !parameter.tensor.defined() || !parameter.tensor.requires_grad()) return;
    if (!seen_.insert(parameter.tensor.unsafeGetTensorImpl()).second) return;
    check(parameter);
    found_.push_back(std::move(parameter));
  }

  void check(const ManagedParameter& parameter) const {
    if (gather_of(parameter.tensor) != nullptr) {
      raise<c10::ValueError>(
          {"DistributedDataParallel",
           parameter.name + " is fully sharded: its gradient is averaged by its block already",
           "drop the wrapper; to average over more ranks give fully_shard a mesh (replicate, shard)"});
    }
    if (parameter.tensor.is_meta()) {
      raise<c10::ValueError>({"DistributedDataParallel",
                              parameter.name + " is on the meta device, it has no memory yet",
                              "give the module its memory before wrapping it"});
    }
    if (parameter.tensor.is_sparse()) {
      raise<c10::ValueError>(
          {"DistributedDataParallel", parameter.name + " is a sparse tensor", "make it dense, or name it in .ignore"});
    }
    if (found_.empty() || found_[0].tensor.device().type() == parameter.tensor.device().type()) return;
    raise<c10::ValueError>(
        {"DistributedDataParallel",
         c10::str("parameters lie on several kinds of devices: ", found_[0].name, " on ", found_[0].tensor.device(),
                  ", ", parameter.name, " on ", parameter.tensor.device()),
         "move the module to one kind of device before wrapping it"});
  }

  const std::set<std::string>& ignored_;
  std::set<const void*> seen_;
  std::vector<ManagedParameter> found_;
};

}  // namespace

bool share_other_ranks(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.root_group() != b.root_group()) return false;
  const auto is_shared = [&](int64_t rank) {
    return rank != a.get_rank() && std::count(b.rank_list().begin(), b.rank_list().end(), rank) != 0;
  };
  return std::any_of(a.rank_list().begin(), a.rank_list().end(), is_shared);
}

std::vector<ManagedParameter> collect_parameters(const torch::nn::Module& module,
                                                 const std::set<std::string>& ignored) {
  Collector collector(ignored);
  collector.visit(module, "");
  return collector.take();
}

void check_names_exist(const torch::nn::Module& module, const std::vector<std::string>& names) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const std::string& name : names) {
    if (parameters.contains(name) || buffers.contains(name)) continue;
    raise<c10::ValueError>({"DistributedDataParallel",
                            c10::str("\"", name, "\" is neither a parameter nor a buffer of ", module.name()),
                            "use a name that named_parameters() or named_buffers() of the module gives"});
  }
}

std::vector<ManagedParameter> parts_of(std::vector<ManagedParameter> parameters) {
  for (ManagedParameter& parameter : parameters) parameter.tensor = part_of(parameter.tensor);
  return parameters;
}

void check_apart(const std::vector<ManagedParameter>& parameters, const DeviceMesh& mesh) {
  for (const ManagedParameter& parameter : parameters) {
    const DTensorMeta* meta = dtensor_meta(parameter.tensor);
    if (meta == nullptr || !share_other_ranks(meta->spec->mesh, mesh)) continue;
    raise<c10::ValueError>({"DistributedDataParallel",
                            c10::str(parameter.name, " is ", meta->spec->to_string(), ", distributed over ranks of ",
                                     mesh.to_string(), " that would average it"),
                            "distribute parameters over another axis than the one given here, such as mesh[\"tp\"]"});
  }
}

at::Tensor gradient_part(const at::Tensor& grad, const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return grad;
  return part_of(DTensor(grad).redistribute(gradient_placements(meta->spec->placements)));
}

at::Tensor as_gradient(const at::Tensor& part, const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return part;
  const Spec& spec = *meta->spec;
  return wrap(
      part, intern_spec(spec.mesh, gradient_placements(spec.placements), spec.sizes, spec.strides, part.scalar_type()));
}

}  // namespace serried::detail
