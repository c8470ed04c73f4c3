// What torch::optim's optimizers keep per parameter and per group, field by field.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>

#include <deque>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace serried::checkpoint::detail {

struct StateField {
  const char* name;
  std::variant<int64_t*, double*, at::Tensor*, std::deque<at::Tensor>*> place;
};

struct OptimizerKind {
  const char* name;
  bool (*is_kind_of)(const torch::optim::OptimizerOptions& options);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  /// The fields of a state of this kind; Failure for one of another.
  std::vector<StateField> (*fields)(torch::optim::OptimizerParamState& state);
  nlohmann::json (*options_json)(const torch::optim::OptimizerOptions& options);
  void (*set_options)(torch::optim::OptimizerOptions& options, const nlohmann::json& json);
  bool has_one_state = false;  // of all parameters, one behind the other; it hangs on the first
};

/// By the type of its options; Failure for optimizers that are none of torch::optim's.
const OptimizerKind& kind_of(const torch::optim::Optimizer& optimizer);

}  // namespace serried::checkpoint::detail
