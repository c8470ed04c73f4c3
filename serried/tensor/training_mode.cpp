// One number for the modes of many modules.
#include "serried/tensor/training_mode.h"

namespace serried {

Witness training_mode(std::string name, std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  return {.name = std::move(name), .value = [modules = std::move(modules)] {
            uint64_t modes = 1;
            for (const auto& module : modules) modes = modes * 31 + uint64_t(module->is_training());
            return modes;
          }};
}

}  // namespace serried
