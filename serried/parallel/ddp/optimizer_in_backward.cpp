// Steps inside the callback that the reducer makes for each averaged parameter.
#include "serried/parallel/ddp/optimizer_in_backward.h"

#include <torch/optim/lbfgs.h>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/parallel/ddp/reducer.h"

namespace serried {
namespace {

std::unique_ptr<torch::optim::Optimizer> checked(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                 const detail::ManagedParameter& parameter) {
  if (!optimizer) {
    raise<c10::ValueError>({"optimizer_in_backward", "the factory gave no optimizer for " + parameter.name,
                            "return a std::unique_ptr to a new optimizer"});
  }
  if (dynamic_cast<torch::optim::LBFGS*>(optimizer.get()) != nullptr) {
    raise<c10::ValueError>({"optimizer_in_backward",
                            "LBFGS evaluates the loss several times per step, which cannot be done inside backward",
                            "call LBFGS's step(closure) after backward"});
  }
  return optimizer;
}

}  // namespace

OptimizersInBackward::OptimizersInBackward(std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers)
    : optimizers_(std::make_shared<decltype(optimizers)>(std::move(optimizers))) {}

void OptimizersInBackward::set_lr(double lr) const {
  for (const auto& optimizer : *optimizers_) {
    for (auto& group : optimizer->param_groups()) group.options().set_lr(lr);
  }
}

OptimizersInBackward optimizer_in_backward(DataParallelBase& ddp, const OptimizerFactory& factory) {
  detail::Reducer& reducer = ddp.reducer();
  if (reducer.is_watched()) {
    raise<c10::ValueError>({"optimizer_in_backward", "this module has optimizers in its backward already",
                            "call it once; change learning rates through what the first call returned"});
  }
  if (!ddp.options().delay_all_reduce.parameters.empty()) {
    raise<c10::ValueError>({"optimizer_in_backward", "delay_all_reduce keeps some gradients out of the buckets",
                            "leave out delay_all_reduce, or step an optimizer after backward"});
  }
  std::vector<std::unique_ptr<torch::optim::Optimizer>> made;
  for (const detail::ManagedParameter& parameter : reducer.parameters()) {
    made.push_back(checked(factory({parameter.tensor}), parameter));
  }
  const OptimizersInBackward optimizers(std::move(made));
  reducer.on_averaged([optimizers, &parameters = reducer.parameters()](size_t index) {
    at::Tensor& grad = parameters[index].tensor.mutable_grad();
    if (!grad.defined()) return;
    trace::Span span("step", trace::kOptimizer);
    span.note("parameter", parameters[index].name);
    optimizers[index].step();
    grad.reset();
  });
  return optimizers;
}

}  // namespace serried
