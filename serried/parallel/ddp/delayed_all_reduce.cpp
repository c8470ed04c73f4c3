// One bucket with a trigger.
#include "serried/parallel/ddp/delayed_all_reduce.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "serried/base/error.h"
#include "serried/base/trace_slices.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/tape/library_hook.h"

namespace serried::detail {
namespace {

constexpr const char* kDelay = "delay_all_reduce";

std::vector<ManagedParameter>::iterator find_parameter(std::vector<ManagedParameter>& parameters,
                                                       const std::string& name) {
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const ManagedParameter& parameter) { return parameter.name == name; });
  if (found != parameters.end()) return found;
  raise<c10::ValueError>({kDelay, c10::str("\"", name, "\" is not a parameter that requires a gradient"),
                          "use names that named_parameters() of the module gives, each once and none of .ignore"});
}

void check_alike(const ManagedParameter& first, const ManagedParameter& other) {
  if (other.sparse_gradient) {
    raise<c10::ValueError>({kDelay, other.name + " has sparse gradients", "leave it out, or make its embedding dense"});
  }
  if (first.tensor.scalar_type() == other.tensor.scalar_type()) return;
  raise<c10::ValueError>({kDelay,
                          c10::str(first.name, " is ", c10::toString(first.tensor.scalar_type()), ", but ", other.name,
                                   " is ", c10::toString(other.tensor.scalar_type())),
                          "delay parameters of one dtype"});
}

Bucket bucket_of_all(const std::vector<ManagedParameter>& parameters, const Group& group) {
  std::vector<size_t> members(parameters.size());
  std::iota(members.begin(), members.end(), 0);
  BucketMemory memory(parameters, group);
  return make_bucket(std::move(members), parameters, memory);
}

}  // namespace

DelayedParameters take_delayed(std::vector<ManagedParameter>& parameters, const DelayedAllReduce& options) {
  if (options.parameters.empty() != options.trigger.empty()) {
    raise<c10::ValueError>(
        {kDelay,
         options.trigger.empty() ? "there are parameters but no trigger" : "there is a trigger but no parameter",
         "name the parameters, and the one whose gradient comes after all of theirs"});
  }
  DelayedParameters delayed;
  if (options.parameters.empty()) return delayed;
  delayed.trigger = *find_parameter(parameters, options.trigger);
  for (const std::string& name : options.parameters) {
    const auto found = find_parameter(parameters, name);
    delayed.parameters.push_back(std::move(*found));
    parameters.erase(found);
    check_alike(delayed.parameters.front(), delayed.parameters.back());
  }
  return delayed;
}

DelayedReducer::DelayedReducer(DelayedParameters delayed, Group group, std::shared_ptr<Claim> claim)
    : delayed_(std::move(delayed)),
      group_(std::move(group)),
      bucket_(bucket_of_all(delayed_.parameters, group_)),
      claim_(std::move(claim)) {}

void DelayedReducer::install_hooks() {
  using torch::autograd::impl::grad_accumulator;
  for (size_t i = 0; i < delayed_.parameters.size(); ++i) {
    hooks_.add(grad_accumulator(delayed_.parameters[i].tensor), [self = weak_from_this(), i] {
      if (const auto reducer = self.lock()) reducer->on_gradient(i);
    });
  }
  // The last one, so that the trigger may be one of the parameters.
  hooks_.add(grad_accumulator(delayed_.trigger.tensor), [self = weak_from_this()] {
    if (const auto reducer = self.lock()) reducer->on_trigger();
  });
}

void DelayedReducer::follow_accumulators() {
  if (hooks_.empty()) return;
  const size_t num_delayed = delayed_.parameters.size();
  for (size_t i = 0; i <= num_delayed; ++i) {
    const at::Tensor& parameter = i < num_delayed ? delayed_.parameters[i].tensor : delayed_.trigger.tensor;
    if (auto node = torch::autograd::impl::grad_accumulator(parameter)) hooks_.move(i, std::move(node));
  }
}

void DelayedReducer::follow_memory() {
  for (const ManagedParameter& parameter : delayed_.parameters) check_alike(delayed_.parameters.front(), parameter);
  set_group(group_);
}

void DelayedReducer::remove_hooks() {
  hooks_.clear();
  claim_.reset();
}

void DelayedReducer::follow(const std::vector<at::Tensor>& outputs, ForwardPasses::PassPtr pass) {
  if (hooks_.empty()) return;
  on_gradient_of(outputs, [self = weak_from_this(), synchronise = pass->synchronise] {
    if (is_towards_chosen_tensors()) return;
    if (const auto reducer = self.lock()) reducer->enter(synchronise);
  });
  passes_.add(std::move(pass));
}

void DelayedReducer::enter(bool synchronise) {
  if (active_ || !synchronise || hooks_.empty()) return;
  claim_->begin_backward();
  active_ = true;
  when_backward_ends([self = weak_from_this()](bool completed) {
    if (const auto reducer = self.lock()) reducer->end(completed);
  });
}

void DelayedReducer::on_gradient(size_t index) {
  enter(passes_.synchronise_this_backward());
  if (!active_ || !bucket_.launched) return;
  raise<c10::ValueError>(
      {kDelay,
       c10::str("the gradient of ", delayed_.parameters[index].name, " came after that of the trigger ",
                delayed_.trigger.name, ", too late to be averaged"),
       "choose a trigger that forward uses before all delayed parameters"});
}

void DelayedReducer::on_trigger() {
  enter(passes_.synchronise_this_backward());
  if (active_ && !bucket_.launched) launch();
}

// Parameters without a gradient get zeros, as other ranks may have one.
void DelayedReducer::gather() {
  for (size_t i = 0; i < delayed_.parameters.size(); ++i) {
    const at::Tensor& parameter = delayed_.parameters[i].tensor;
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) {
      bucket_.views[i].zero_();
    } else if (!grad.is_same(bucket_.gradients[i])) {
      bucket_.views[i].copy_(gradient_part(grad, parameter));
    }
    grad = bucket_.gradients[i];
  }
}

void DelayedReducer::launch() {
  at::NoGradGuard no_grad;
  gather();
  bucket_.launched = true;
  bucket_.flat.div_(group_->getSize());
  const watch::PartOf scope("DDP's delayed bucket");
  const trace::Details details({{"parameters", int64_t(delayed_.parameters.size())}});
  bucket_.work = ops::start_all_reduce_(bucket_.flat, group_, share(c10d::ReduceOp::SUM));
}

void DelayedReducer::end(bool completed) {
  try {
    if (!completed) return reset();
    if (!bucket_.launched) launch();
    bucket_.work->wait();
  } catch (...) {
    reset();
    throw;
  }
  bucket_.end_round();
  passes_.close();
  active_ = false;
}

void DelayedReducer::reset() {
  active_ = false;
  passes_.close();
  if (!bucket_.launched) return;
  for (const ManagedParameter& parameter : delayed_.parameters) parameter.tensor.mutable_grad().reset();
  // A late reduction may still write to the old memory.
  bucket_ = bucket_of_all(delayed_.parameters, group_);
}

void DelayedReducer::set_group(Group group) {
  reset();
  at::NoGradGuard no_grad;
  group_ = std::move(group);
  Bucket bucket = bucket_of_all(delayed_.parameters, group_);
  for (size_t i = 0; i < delayed_.parameters.size(); ++i) {
    at::Tensor& grad = delayed_.parameters[i].tensor.mutable_grad();
    if (!grad.defined() || !is_same_memory(part_of(grad), bucket_.views[i])) continue;
    bucket.views[i].copy_(bucket_.views[i]);
    grad = bucket.gradients[i];
  }
  bucket_ = std::move(bucket);
}

}  // namespace serried::detail
