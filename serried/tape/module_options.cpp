// Finds the options of a module by its class.
#include "serried/tape/module_options.h"

#include <torch/nn/modules.h>

#include <bit>
#include <limits>
#include <optional>
#include <typeindex>
#include <unordered_map>

#include "serried/base/hash.h"
#include "serried/tape/facts.h"

namespace serried::tape {
namespace {

using HashOfModule = uint64_t (*)(const torch::nn::Module& module, uint64_t hash);

uint64_t mix_number(uint64_t hash, std::optional<double> number) {
  return mix_hash(hash, std::bit_cast<uint64_t>(number.value_or(std::numeric_limits<double>::quiet_NaN())));
}

template <class Kind>
uint64_t mix_options(const torch::nn::Module& module, uint64_t hash) {
  const auto& options = dynamic_cast<const Kind&>(module).options;
  if constexpr (requires { options.eps(); }) hash = mix_number(hash, options.eps());
  if constexpr (requires { options.momentum(); }) hash = mix_number(hash, options.momentum());
  if constexpr (requires { options.p(); }) hash = mix_number(hash, options.p());
  if constexpr (requires { options.dropout(); }) hash = mix_number(hash, options.dropout());
  return hash;
}

template <class... Kinds>
std::unordered_map<std::type_index, HashOfModule> hashes_for() {
  return {{std::type_index(typeid(Kinds)), &mix_options<Kinds>}...};
}

const std::unordered_map<std::type_index, HashOfModule>& known_kinds() {
  using namespace torch::nn;
  static const auto kinds =
      hashes_for<AlphaDropoutImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, Dropout2dImpl, Dropout3dImpl,
                 DropoutImpl, FeatureAlphaDropoutImpl, GroupNormImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                 InstanceNorm3dImpl, LayerNormImpl, MultiheadAttentionImpl>();
  return kinds;
}

uint64_t hash_of_all_options(const torch::nn::Module& module) {
  uint64_t hash = 1;
  for (const auto& each : module.modules()) {
    const torch::nn::Module& one = *each;
    const auto found = known_kinds().find(std::type_index(typeid(one)));
    if (found != known_kinds().end()) hash = found->second(one, hash);
  }
  return hash;
}

}  // namespace

Fact options_of(const std::string& name, const std::shared_ptr<const torch::nn::Module>& module) {
  return {.name = "options of modules in " + name,
          .value =
              [module = std::weak_ptr<const torch::nn::Module>(module)] {
                const auto alive = module.lock();
                return alive ? hash_of_all_options(*alive) : 0;
              },
          .subject = module.get(),
          .text = fingerprint_text};
}

}  // namespace serried::tape
