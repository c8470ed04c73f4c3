// One fused op per batch, with step counts that ops advance.
#include "serried/optim/adam.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/tape/facts.h"
#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

template <class Options>
constexpr bool is_adamw = std::is_same_v<Options, torch::optim::AdamWOptions>;

template <class Options>
constexpr const char* adam_name = is_adamw<Options> ? "AdamW" : "Adam";

template <class Options>
void check_adam(const Options& options) {
  const auto [beta1, beta2] = options.betas();
  const auto require = [](bool holds, const std::string& what, const char* fix) {
    if (!holds) raise<c10::ValueError>({adam_name<Options>, what, fix});
  };
  require(options.lr() >= 0, c10::str("lr is ", options.lr()), "pass 0 or more");
  require(options.eps() >= 0, c10::str("eps is ", options.eps()), "pass 0 or more");
  require(0 <= beta1 && beta1 < 1, c10::str("the first of betas is ", beta1), "pass 0 or more, below 1");
  require(0 <= beta2 && beta2 < 1, c10::str("the second of betas is ", beta2), "pass 0 or more, below 1");
  require(options.weight_decay() >= 0, c10::str("weight_decay is ", options.weight_decay()), "pass 0 or more");
}

template <class Options, class... Arguments>
void run_fused_adam(const Arguments&... arguments) {
  if constexpr (is_adamw<Options>) {
    at::_fused_adamw_(arguments...);
  } else {
    at::_fused_adam_(arguments...);
  }
}

std::vector<StepCountPtr> without_repeats(const std::vector<StepCountPtr>& counts) {
  std::vector<StepCountPtr> distinct;
  for (const StepCountPtr& count : counts) {
    if (std::find(distinct.begin(), distinct.end(), count) == distinct.end()) distinct.push_back(count);
  }
  return distinct;
}

}  // namespace

StepCount::StepCount(int64_t value, at::Device device) : value_(value) {
  const tape::Pause off_tape;
  tensor_ = at::full({}, double(value), at::TensorOptions(at::kFloat).device(device));
}

void StepCount::begin() {
  if (!is_written_) {
    const tape::Pause off_tape;
    tensor_.fill_(double(value_));
  }
  is_written_ = false;
}

void StepCount::end() {
  ++value_;
  is_written_ = true;
}

std::vector<StepCountPtr> StepCounts::of(const std::vector<at::Tensor>& params, const std::vector<int64_t>& made) {
  std::vector<StepCountPtr> counts;
  for (const at::Tensor& param : params) {
    counts.push_back(by_param_[param.unsafeGetTensorImpl()]);
    if (counts.back()) ++counts.back()->num_stepping_;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const StepCountPtr& count = counts[i];
    const bool stays = count && count->value_ == made[i] && count->num_stepping_ == count->num_users_;
    if (!stays) counts[i] = nullptr;
  }
  // In a loop of its own: it changes the numbers of users that the one above compares.
  std::unordered_map<int64_t, StepCountPtr> fresh;
  for (size_t i = 0; i < params.size(); ++i) {
    StepCountPtr& kept = by_param_[params[i].unsafeGetTensorImpl()];
    if (kept) kept->num_stepping_ = 0;
    if (counts[i]) continue;
    if (kept) --kept->num_users_;
    StepCountPtr& shared = fresh[made[i]];
    if (!shared) shared = std::make_shared<StepCount>(made[i], params[i].device());
    ++shared->num_users_;
    counts[i] = kept = shared;
  }
  return counts;
}

at::Tensor StepCounts::tensor_of(const at::Tensor& param, int64_t made) const {
  const auto found = by_param_.find(param.unsafeGetTensorImpl());
  if (found == by_param_.end() || found->second->value() != made) return {};
  return found->second->tensor();
}

template <class Options, class State>
AdamLike<Options, State>::AdamLike(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults)
    : CapturableOptimizer(adam_name<Options>, groups, std::make_unique<Options>(defaults)) {
  check_adam(defaults);
  for (const auto& group : param_groups_) check_adam(static_cast<const Options&>(group.options()));
}

template <class Options, class State>
State& AdamLike<Options, State>::state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

template <class Options, class State>
auto AdamLike<Options, State>::state_of(const Batch& batch) -> Lists {
  const auto& options = static_cast<const Options&>(param_groups_[batch.group].options());
  Lists lists;
  for (size_t i = 0; i < batch.params.size(); ++i) {
    State& state = state_of(batch.params[i]);
    const at::Tensor& value = batch.values[i];
    state.exp_avg(state_tensor(state.exp_avg(), value, "exp_avg"));
    state.exp_avg_sq(state_tensor(state.exp_avg_sq(), value, "exp_avg_sq"));
    lists.averages.push_back(state.exp_avg());
    lists.squares.push_back(state.exp_avg_sq());
    lists.made.push_back(state.step());
    if (!options.amsgrad()) continue;
    state.max_exp_avg_sq(state_tensor(state.max_exp_avg_sq(), value, "max_exp_avg_sq"));
    lists.maxima.push_back(state.max_exp_avg_sq());
  }
  return lists;
}

template <class Options, class State>
auto AdamLike<Options, State>::count(const std::vector<at::Tensor>& params, const std::vector<StepCountPtr>& counts)
    -> HostWork {
  return {[counts] {
            for (const StepCountPtr& count : counts) count->begin();
          },
          [this, params = std::vector<WeakTensor>(params.begin(), params.end()), counts] {
            for (const StepCountPtr& count : counts) count->end();
            for (const WeakTensor& stepped : params) {
              const at::Tensor param = stepped.lock();
              if (!param.defined()) continue;
              State& state = state_of(param);
              state.step(state.step() + 1);
            }
          }};
}

template <class Options, class State>
auto AdamLike<Options, State>::update(const Batch& batch) -> HostWork {
  if (batch.kind.grad_layout != at::kStrided) {
    raise<c10::ValueError>({name(), c10::str("a gradient of layout ", batch.kind.grad_layout),
                            "make it dense, e.g. torch::nn::EmbeddingOptions(...).sparse(false), or use serried::SGD"});
  }
  const Lists state = state_of(batch);
  const std::vector<StepCountPtr> counts = counts_.of(batch.params, state.made);
  const std::vector<StepCountPtr> distinct = without_repeats(counts);
  HostWork host = count(batch.params, distinct);
  host.before();
  for (const StepCountPtr& count : distinct) count->tensor().add_(1);
  std::vector<at::Tensor> steps;
  for (const StepCountPtr& count : counts) steps.push_back(count->tensor());
  const auto& options = static_cast<const Options&>(param_groups_[batch.group].options());
  const auto [beta1, beta2] = options.betas();
  run_fused_adam<Options>(as_real(batch.values), as_real(batch.grads), as_real(state.averages), as_real(state.squares),
                          as_real(state.maxima), steps, learning_rate(batch.group), beta1, beta2,
                          options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false);
  bump_versions(batch.values);
  host.after();
  return host;
}

template <class Options, class State>
uint64_t AdamLike<Options, State>::constants(const torch::optim::OptimizerOptions& base) const {
  const auto& options = static_cast<const Options&>(base);
  const auto [beta1, beta2] = options.betas();
  uint64_t hash = options.amsgrad();
  for (double number : {beta1, beta2, options.eps(), options.weight_decay()}) {
    hash = mix_hash(hash, std::bit_cast<uint64_t>(number));
  }
  return hash;
}

template <class Options, class State>
uint64_t AdamLike<Options, State>::state_identity(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found == state_.end()) return 0;
  const auto& state = static_cast<const State&>(*found->second);
  uint64_t hash = tape::identity_of(counts_.tensor_of(param, state.step()));
  for (const at::Tensor* t : {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}) {
    hash = mix_hash(hash, tape::identity_of(*t));
  }
  return hash;
}

template <class Options, class State>
void AdamLike<Options, State>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <class Options, class State>
void AdamLike<Options, State>::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
}

template class AdamLike<torch::optim::AdamOptions, torch::optim::AdamParamState>;
template class AdamLike<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace serried::detail
