// Folds many modes, addresses and options into one number.
#include "serried/tape/facts.h"

#include <torch/nn/modules.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <bit>
#include <initializer_list>

#include "serried/base/hash.h"

namespace serried::tape {
namespace {

constexpr int kCountBits = 16;
constexpr uint64_t kCountMask = (uint64_t(1) << kCountBits) - 1;

std::string mode_text(uint64_t value) {
  return c10::str("train in ", value & kCountMask, " of ", (value >> kCountBits) & kCountMask, " modules");
}

template <class Kind, class... Members>
void add_members(uint64_t& hash, const torch::nn::Module& module, Members... members) {
  const auto* known = dynamic_cast<const Kind*>(&module);
  if (known != nullptr) ((hash = mix_hash(hash, identity_of(known->*members))), ...);
}

template <class... Kinds>
void add_weights(uint64_t& hash, const torch::nn::Module& module) {
  (add_members<Kinds>(hash, module, &Kinds::weight, &Kinds::bias), ...);
}

template <class... Kinds>
void add_statistics(uint64_t& hash, const torch::nn::Module& module) {
  (add_members<Kinds>(hash, module, &Kinds::running_mean, &Kinds::running_var), ...);
}

template <class... Kinds>
void add_cells(uint64_t& hash, const torch::nn::Module& module) {
  (add_members<Kinds>(hash, module, &Kinds::weight_ih, &Kinds::weight_hh, &Kinds::bias_ih, &Kinds::bias_hh), ...);
}

// Members that forward() uses are handles beside those that are registered: std::swap(net->weight, average) changes
// only them. Those of torch's own modules are known.
uint64_t hash_of_members(const torch::nn::Module& module, uint64_t hash) {
  using namespace torch::nn;
  add_weights<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
              ConvTranspose3dImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
              InstanceNorm2dImpl, InstanceNorm3dImpl, LayerNormImpl, GroupNormImpl>(hash, module);
  add_statistics<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                 InstanceNorm3dImpl>(hash, module);
  add_cells<RNNCellImpl, LSTMCellImpl, GRUCellImpl>(hash, module);
  add_members<EmbeddingImpl>(hash, module, &EmbeddingImpl::weight);
  add_members<EmbeddingBagImpl>(hash, module, &EmbeddingBagImpl::weight);
  add_members<PReLUImpl>(hash, module, &PReLUImpl::weight);
  using Attention = MultiheadAttentionImpl;
  add_members<Attention>(hash, module, &Attention::in_proj_weight, &Attention::in_proj_bias, &Attention::bias_k,
                         &Attention::bias_v, &Attention::q_proj_weight, &Attention::k_proj_weight,
                         &Attention::v_proj_weight);
  return hash;
}

uint64_t hash_of(const torch::nn::Module& module, uint64_t hash) {
  hash = hash_of_members(module, hash);
  for (const at::Tensor& t : module.parameters(/*recurse=*/false)) hash = mix_hash(hash, identity_of(t));
  hash = mix_hash(hash, 1);
  for (const at::Tensor& t : module.buffers(/*recurse=*/false)) hash = mix_hash(hash, identity_of(t));
  // A member holder that becomes another module (net->layer = Linear(3, 2)) leaves the registered one, with a holder
  // less.
  for (const auto& child : module.children()) {
    hash = mix_hash(mix_hash(hash, uint64_t(reinterpret_cast<uintptr_t>(child.get()))), uint64_t(child.use_count()));
    hash = hash_of(*child, hash);
  }
  return mix_hash(hash, 2);
}

uint64_t hash_numbers(std::initializer_list<double> numbers) {
  uint64_t hash = 1;
  for (double number : numbers) hash = mix_hash(hash, std::bit_cast<uint64_t>(number));
  return hash;
}

template <class Options>
uint64_t hash_of_adam(const Options& o) {
  const auto& [beta1, beta2] = o.betas();
  return hash_numbers({o.lr(), beta1, beta2, o.eps(), o.weight_decay(), double(o.amsgrad())});
}

uint64_t hash_of(const torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  if (const auto* o = dynamic_cast<const SGDOptions*>(&options)) {
    return hash_numbers({o->lr(), o->momentum(), o->dampening(), o->weight_decay(), double(o->nesterov())});
  }
  if (const auto* o = dynamic_cast<const AdamOptions*>(&options)) return hash_of_adam(*o);
  if (const auto* o = dynamic_cast<const AdamWOptions*>(&options)) return hash_of_adam(*o);
  if (const auto* o = dynamic_cast<const AdagradOptions*>(&options)) {
    return hash_numbers({o->lr(), o->lr_decay(), o->weight_decay(), o->initial_accumulator_value(), o->eps()});
  }
  if (const auto* o = dynamic_cast<const RMSpropOptions*>(&options)) {
    return hash_numbers({o->lr(), o->alpha(), o->eps(), o->weight_decay(), o->momentum(), double(o->centered())});
  }
  return hash_numbers({options.get_lr()});
}

}  // namespace

std::string fingerprint_text(uint64_t value) {
  if (value == 0) return "gone";
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "fingerprint ";
  for (int shift = 12; shift >= 0; shift -= 4) text += kDigits[(value >> shift) % 16];
  return text;
}

Fact training_mode(std::string name, const std::shared_ptr<const torch::nn::Module>& module) {
  const auto value = [module = std::weak_ptr<const torch::nn::Module>(module)]() -> uint64_t {
    const auto alive = module.lock();
    if (!alive) return 0;
    uint64_t which = 1, training = 0;
    const auto modules = alive->modules();
    for (const auto& each : modules) {
      which = which * 31 + uint64_t(each->is_training());
      training += uint64_t(each->is_training());
    }
    // The counts are for readers.
    return which << 2 * kCountBits | uint64_t(modules.size()) << kCountBits | training;
  };
  return {.name = std::move(name), .value = value, .subject = module.get(), .text = mode_text};
}

Fact contents_of(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  return {.name = "tensors and modules in " + name,
          .value =
              [module = std::weak_ptr<torch::nn::Module>(module)] {
                const auto alive = module.lock();
                return alive ? hash_of(*alive, 1) : 0;
              },
          .subject = module.get(),
          .text = fingerprint_text};
}

uint64_t parameters_of(const torch::optim::OptimizerParamGroup& group) {
  uint64_t hash = group.params().size();
  for (const at::Tensor& t : group.params()) hash = mix_hash(hash, identity_of(t));
  return hash;
}

Fact groups_of(const std::string& name, torch::optim::Optimizer& optimizer) {
  const auto value = [&optimizer] {
    uint64_t hash = 1;
    for (const auto& group : optimizer.param_groups()) {
      hash = mix_hash(mix_hash(hash, hash_of(group.options())), parameters_of(group));
    }
    return hash;
  };
  return {.name = "parameters and options of " + name, .value = value, .subject = &optimizer, .text = fingerprint_text};
}

}  // namespace serried::tape
