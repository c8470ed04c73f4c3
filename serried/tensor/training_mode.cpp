// One number for the modes of many modules.
#include "serried/tensor/training_mode.h"

namespace serried {

namespace {

constexpr int kCountBits = 16;
constexpr uint64_t kCountMask = (uint64_t(1) << kCountBits) - 1;

std::string mode_text(uint64_t value) {
  return c10::str("train in ", value & kCountMask, " of ", (value >> kCountBits) & kCountMask, " modules");
}

}  // namespace

Witness training_mode(std::string name, const std::shared_ptr<torch::nn::Module>& module) {
  const auto value = [modules = module->modules()] {
    uint64_t which = 1, training = 0;
    for (const auto& each : modules) {
      which = which * 31 + uint64_t(each->is_training());
      training += uint64_t(each->is_training());
    }
    // The counts are for readers.
    return which << 2 * kCountBits | uint64_t(modules.size()) << kCountBits | training;
  };
  return {.name = std::move(name), .value = value, .subject = module.get(), .text = mode_text};
}

}  // namespace serried
