// The modules of torch::nn whose parameters ops consume in a way that styles know.
#include "serried/parallel/tensor_parallel/consumers.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <utility>

#include "serried/base/error.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/making/modules.h"

namespace serried::detail {
namespace {

thread_local const std::string* current_path = nullptr;

void ask_nothing(torch::nn::Module& module, const DeviceMesh& mesh) {
  const std::optional<Consumer> consumer = consumer_of(module);
  if (!consumer.has_value() || !consumer->weight.defined()) return;
  const bool is_placed = is_dtensor(consumer->weight);
  if (!is_placed) distribute_parameter(consumer->weight, mesh);
  if (is_placed && !(DTensor(consumer->weight).device_mesh() == mesh)) return;
  if (role_of(consumer->weight, consumer->role) == nullptr) set_role(consumer->weight, mesh, consumer->role, {});
}

}  // namespace

std::optional<Consumer> consumer_of(torch::nn::Module& module) {
  namespace nn = torch::nn;
  if (auto* m = module.as<nn::LinearImpl>()) return Consumer{ConsumerKind::linear, m->weight, m->bias, Role::matrix};
  if (auto* m = module.as<nn::EmbeddingImpl>()) {
    return Consumer{ConsumerKind::embedding, m->weight, {}, Role::table};
  }
  if (auto* m = module.as<nn::LayerNormImpl>()) return Consumer{ConsumerKind::norm, m->weight, m->bias, Role::norm};
  if (auto* m = module.as<nn::GroupNormImpl>()) return Consumer{ConsumerKind::norm, m->weight, m->bias, Role::norm};
  if (auto* m = module.as<nn::MultiheadAttentionImpl>()) {
    return Consumer{ConsumerKind::attention, m->in_proj_weight, m->in_proj_bias, Role::matrix};
  }
  return std::nullopt;
}

ApplyingTo::ApplyingTo(const std::string& path) : previous_(std::exchange(current_path, &path)) {}

ApplyingTo::~ApplyingTo() {
  current_path = previous_;
}

std::string described(const torch::nn::Module& module) {
  if (current_path == nullptr || current_path->empty()) return "the module (" + module.name() + ")";
  return "\"" + *current_path + "\" (" + module.name() + ")";
}

void check_not_sharded(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    if (gather_of(item.value()) == nullptr) continue;
    const Spec& spec = *dtensor_meta(item.value())->spec;
    raise<c10::ValueError>(
        {"parallelize_module",
         c10::str(item.key(), " of ", described(module), " is fully sharded already: ", spec.to_string()),
         "swap the order: parallelize_module first, over mesh[\"tp\"], then fully_shard with {.mesh = "
         "mesh[\"dp\"]} of the same mesh"});
  }
}

void place_the_rest(torch::nn::Module& module, const DeviceMesh& mesh) {
  for (const std::shared_ptr<torch::nn::Module>& each : module.modules(/*include_self=*/false)) {
    ask_nothing(*each, mesh);
  }
  ask_nothing(module, mesh);
  for (const at::Tensor& t : module.parameters()) {
    if (t.defined() && !is_dtensor(t)) distribute_parameter(t, mesh);
  }
  for (const at::Tensor& t : module.buffers()) {
    if (t.defined() && !is_dtensor(t)) distribute_parameter(t, mesh);
  }
}

}  // namespace serried::detail
