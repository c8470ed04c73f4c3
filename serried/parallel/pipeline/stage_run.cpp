// Forwards, backwards and their two parts, with the checks of what comes from other stages.
#include "serried/parallel/pipeline/stage_run.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

// On which a stage computes: of a parameter that is gathered, that of its whole value.
std::optional<DeviceMesh> mesh_of(const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return std::nullopt;
  const auto* gathered = dynamic_cast<const BlockParameter*>(gather_of(parameter));
  if (gathered == nullptr) return meta->spec->mesh;
  const SpecPtr& inner = gathered->block->members()[gathered->index].inner;
  return inner ? std::optional(inner->mesh) : std::nullopt;
}

std::optional<DeviceMesh> mesh_of(const torch::nn::Module& module) {
  std::optional<DeviceMesh> mesh;
  for (const at::Tensor& parameter : module.parameters()) {
    const std::optional<DeviceMesh> its = mesh_of(parameter);
    if (!its) continue;
    if (mesh && !(*mesh == *its)) return std::nullopt;
    mesh = its;
  }
  return mesh;
}

// A gradient is never left as a sum that others have to add up.
Placements gradient_placements(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return placements;
}

at::Tensor gradient_to_send(const at::Tensor& input, const at::Tensor& gradient) {
  const DTensorMeta* meta = dtensor_meta(input);
  if (!gradient.defined() || meta == nullptr || !is_dtensor(gradient)) return gradient;
  const at::NoGradGuard no_grad;
  return DTensor(gradient).redistribute(gradient_placements(meta->spec->placements));
}

std::string layout_text(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  return meta != nullptr ? meta->spec->to_string() : watch::describe_tensor(t);
}

}  // namespace

StageRun::StageRun(PipelineStage stage, int64_t index)
    : stage_(std::move(stage)), index_(index), sync_(stage_.module()), mesh_(mesh_of(*stage_.module())) {}

at::Tensor StageRun::forward(int64_t microbatch, Received input, const Finish& finish) {
  Flight flight;
  if (index_ > 0) {
    if (at::GradMode::is_enabled() && input.requires_grad) input.tensor.requires_grad_(true);
    flight.input = input.tensor;
  }
  const at::Tensor output = stage_.forward(input.tensor);
  if (!output.defined()) {
    raise<c10::ValueError>({"Pipeline", c10::str("stage ", index_, " (", stage_.module()->name(), ") gives no tensor"),
                            "return one from forward"});
  }
  if (!at::GradMode::is_enabled()) return output;
  at::Tensor result = output.detach();
  const at::Tensor root = finish ? finish(output) : output;
  if (root.requires_grad()) {
    flight.root = torch::autograd::impl::gradient_edge(root);
    if (finish) flight.seed = at::ones_like(root.detach());
  }
  flight.sizes = c10::DimVector(output.sizes().begin(), output.sizes().end());
  flight.dtype = output.scalar_type();
  if (const DTensorMeta* meta = dtensor_meta(output)) flight.spec = meta->spec;
  flights_.insert_or_assign(microbatch, std::move(flight));
  // What the next stage is told of the gradient, without the graph.
  if (!finish && root.requires_grad()) result.requires_grad_(true);
  return result;
}

std::optional<DeviceMesh> StageRun::output_mesh(int64_t microbatch) const {
  const SpecPtr& spec = flights_.at(microbatch).spec;
  return spec ? std::optional(spec->mesh) : std::nullopt;
}

void StageRun::check_gradient(const Flight& flight, const at::Tensor& gradient) const {
  const DTensorMeta* meta = dtensor_meta(gradient);
  const bool lies_alike = (meta != nullptr) == bool(flight.spec) &&
                          (meta == nullptr || meta->spec->placements == gradient_placements(flight.spec->placements));
  if (lies_alike && gradient.sizes() == flight.sizes && gradient.scalar_type() == flight.dtype) return;
  raise<c10::ValueError>(
      {"Pipeline",
       c10::str("stage ", index_ + 1, " gives ", layout_text(gradient), " as the gradient of what stage ", index_,
                " gave, ",
                flight.spec ? flight.spec->to_string() : watch::dtype_name(flight.dtype) + sizes_text(flight.sizes)),
       "let each stage take the tensor as the stage before gives it"});
}

at::Tensor StageRun::backward(int64_t microbatch, const at::Tensor& gradient, bool is_split) {
  const auto found = flights_.find(microbatch);
  Flight& flight = found->second;
  const at::Tensor start = flight.seed.defined() ? flight.seed : gradient;
  const bool computes = flight.root.is_valid() && start.defined();
  if (computes && !flight.seed.defined()) check_gradient(flight, start);
  last_computed_ = computes;
  num_computed_ += int64_t(computes);
  at::Tensor result;
  torch::autograd::Edge root = std::exchange(flight.root, {});
  if (computes && is_split) {
    flight.split = std::make_unique<SplitBackward>(std::move(root), start, flight.input);
    result = flight.split->input_gradient();
  } else if (computes) {
    run_whole_backward(root, start);
    if (flight.input.defined()) result = flight.input.grad();
  }
  result = gradient_to_send(flight.input, result);
  if (is_split) {
    flight.input.reset();
    flight.seed.reset();
  } else {
    flights_.erase(found);
  }
  return result;
}

void StageRun::backward_weights(int64_t microbatch) {
  const auto found = flights_.find(microbatch);
  const std::unique_ptr<SplitBackward> split = std::move(found->second.split);
  flights_.erase(found);
  last_computed_ = split != nullptr;
  if (split) split->run_weights();
}

void StageRun::check_reduced(int64_t microbatch) const {
  if (last_computed_ || num_computed_ == 0 || !sync_.has_any()) return;
  raise<c10::ValueError>(
      {"Pipeline",
       c10::str("nothing of stage ", index_, " needs a gradient in micro-batch ", microbatch,
                ", whose backward is the stage's last and reduces the gradients of all ", num_computed_, " before it"),
       "let every loss depend on the output, as 0 * output.sum() does where a micro-batch has nothing to learn from"});
}

}  // namespace serried::detail
