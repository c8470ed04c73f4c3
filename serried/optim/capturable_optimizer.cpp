// Sorts parameters into batches for fused ops, and tells a recorder what these ops do not show.
#include "serried/optim/capturable_optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <unordered_map>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/tape/facts.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

bool has_gradient(const at::Tensor& param) {
  return param.grad().defined();
}

bool has_repeats(std::vector<const c10::TensorImpl*> all) {
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) != all.end();
}

bool got_gradient(const WeakTensor& idle) {
  const at::Tensor param = idle.lock();
  return param.defined() && has_gradient(param);
}

// Fused kernels walk through memory without a look at strides: all operands have to lie as the parameter does. Parts of
// DTensors are contiguous anyway.
at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& t) {
  if (t.layout() != at::kStrided || is_dtensor(like)) return t.to(like.scalar_type());
  if (t.scalar_type() == like.scalar_type() && t.strides() == like.strides()) return t;
  return at::empty_like(like).copy_(t);
}

}  // namespace

CapturableOptimizer::CapturableOptimizer(std::string name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                         std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(groups, std::move(defaults)), name_(std::move(name)) {}

at::Tensor CapturableOptimizer::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  sync_options();
  const std::vector<Batch> all = batches();
  std::vector<HostWork> host_work;
  for (const Batch& batch : all) {
    host_work.push_back(update(batch));
    for (size_t i = 0; i < batch.params.size(); ++i) {
      if (!batch.values[i].is_same(batch.params[i])) batch.params[i].copy_(batch.values[i]);
    }
  }
  if (tape::is_recording()) {
    repeat_at_replays(host_work);
    rely_on_state(all);
  }
  return loss;
}

void CapturableOptimizer::sync_options() {
  const tape::Pause off_tape;
  while (learning_rates_.size() < param_groups_.size()) {
    learning_rates_.push_back({at::empty({}, at::kDouble), std::numeric_limits<double>::quiet_NaN()});
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const double lr = param_groups_[i].options().get_lr();
    LearningRate& rate = learning_rates_[i];
    if (rate.written == lr) continue;
    *rate.tensor.mutable_data_ptr<double>() = lr;
    rate.written = lr;
  }
}

// Looked for again only where the groups list other tensors than in the last step.
bool CapturableOptimizer::lists_repeats() {
  size_t count = 0;
  bool is_same = true;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      is_same = is_same && count < listed_.size() && listed_[count] == param.unsafeGetTensorImpl();
      ++count;
    }
  }
  if (is_same && count == listed_.size()) return lists_repeats_;
  listed_.clear();
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) listed_.push_back(param.unsafeGetTensorImpl());
  }
  return lists_repeats_ = has_repeats(listed_);
}

// A parameter that is listed twice, as a tied weight is in parameters(), steps twice, as torch::optim's do: a fused op
// may meet it once only.
auto CapturableOptimizer::batches() -> std::vector<Batch> {
  std::vector<std::vector<Batch>> rounds(1);
  std::unordered_map<const c10::TensorImpl*, size_t> times;
  const bool repeats = lists_repeats();
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    for (const at::Tensor& param : param_groups_[group].params()) {
      const size_t round = repeats ? times[param.unsafeGetTensorImpl()]++ : 0;
      if (round == rounds.size()) rounds.emplace_back();
      add_to(rounds[round], group, param);
    }
  }
  std::vector<Batch> found = std::move(rounds[0]);
  for (size_t i = 1; i < rounds.size(); ++i) std::move(rounds[i].begin(), rounds[i].end(), std::back_inserter(found));
  return found;
}

void CapturableOptimizer::add_to(std::vector<Batch>& batches, size_t group, const at::Tensor& param) const {
  const at::Tensor& grad = param.grad();
  if (!grad.defined()) return;
  if (grad.sizes() != param.sizes()) {
    raise<c10::ValueError>({name_,
                            c10::str("a gradient of shape ", grad.sizes(), " for a parameter of shape ", param.sizes()),
                            "give the gradient the parameter's shape"});
  }
  const DTensorMeta* meta = dtensor_meta(param);
  const Kind kind{param.device(), param.scalar_type(), grad.layout(),
                  meta == nullptr ? std::nullopt : std::optional(meta->spec->mesh.id())};
  auto batch =
      std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return b.group == group && b.kind == kind; });
  if (batch == batches.end()) batch = batches.insert(batch, Batch{group, kind});
  const bool has_gaps = meta == nullptr && !param.is_non_overlapping_and_dense();
  const at::Tensor value = has_gaps ? param.contiguous() : param;
  batch->params.push_back(param);
  batch->values.push_back(value);
  batch->grads.push_back(laid_out_as(value, grad));
}

at::Tensor CapturableOptimizer::state_tensor(const at::Tensor& saved, const at::Tensor& value, const char* what) const {
  const tape::Pause off_tape;
  if (!saved.defined()) return at::zeros_like(value);
  if (saved.sizes() != value.sizes()) {
    raise<c10::ValueError>(
        {name_, c10::str("the state \"", what, "\" has shape ", saved.sizes(), ", its parameter ", value.sizes()),
         "load a checkpoint of the same model, or erase this parameter's state()"});
  }
  // Loaded from a checkpoint of plain tensors, or made before its parameter was distributed: every rank has all of it.
  if (is_dtensor(value) && !is_dtensor(saved)) {
    const DTensor like(value);
    return distribute_tensor(saved.to(value.scalar_type()), like.device_mesh(), like.placements(), {.source = {}});
  }
  return laid_out_as(value, saved);
}

void CapturableOptimizer::repeat_at_replays(const std::vector<HostWork>& host_work) {
  const auto while_alive = [alive = std::weak_ptr<bool>(alive_)](std::function<void()> action) {
    return [alive, action = std::move(action)] {
      if (!alive.expired()) action();
    };
  };
  tape::before_replay(while_alive([this] { sync_options(); }));
  for (const HostWork& work : host_work) {
    if (work.before) tape::before_replay(while_alive(work.before));
    if (work.after) tape::after_replay(while_alive(work.after));
  }
}

void CapturableOptimizer::rely_on_state(const std::vector<Batch>& batches) {
  const std::weak_ptr<bool> alive = alive_;
  tape::rely_on({.name = "options of " + name_,
                 .value = [this, alive] { return alive.expired() ? 0 : hash_of_options(); },
                 .subject = this,
                 .text = tape::fingerprint_text});
  std::vector<WeakTensor> stepped;
  for (const Batch& batch : batches) stepped.insert(stepped.end(), batch.params.begin(), batch.params.end());
  tape::rely_on(
      {.name = "parameters and state of " + name_,
       .value = [this, alive, stepped = std::move(stepped)] { return alive.expired() ? 0 : hash_of_state(stepped); },
       .subject = this,
       .text = tape::fingerprint_text});
  // Gradients of parameters that step come and go with backward, which is recorded: only those of the others count.
  tape::rely_on(
      {.name = "parameters without gradients of " + name_,
       .value = [idle =
                     without_gradients()] { return uint64_t(std::count_if(idle.begin(), idle.end(), got_gradient)); },
       .subject = this,
       .text = [](uint64_t count) { return count == 0 ? std::string("all") : c10::str("all but ", count); }});
}

std::vector<WeakTensor> CapturableOptimizer::without_gradients() const {
  std::vector<WeakTensor> found;
  for (const auto& group : param_groups_) {
    std::copy_if(group.params().begin(), group.params().end(), std::back_inserter(found), std::not_fn(has_gradient));
  }
  return found;
}

uint64_t CapturableOptimizer::hash_of_options() const {
  uint64_t hash = 1;
  for (const auto& group : param_groups_) hash = mix_hash(hash, constants(group.options()));
  return hash;
}

uint64_t CapturableOptimizer::hash_of_state(const std::vector<WeakTensor>& stepped) const {
  uint64_t hash = 1;
  for (const WeakTensor& param : stepped) hash = mix_hash(hash, state_identity(param.lock()));
  for (const auto& group : param_groups_) hash = mix_hash(hash, tape::parameters_of(group));
  return hash;
}

std::vector<at::Tensor> detail::as_real(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty() || !tensors.front().is_complex()) return tensors;
  std::vector<at::Tensor> real;
  for (const at::Tensor& t : tensors) real.push_back(at::view_as_real(t.resolve_conj()));
  return real;
}

void detail::bump_versions(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace serried
