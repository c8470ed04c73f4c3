// The modules of torch::nn whose parameters ops consume in a way that styles know.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "serried/tensor/above.h"

namespace serried::detail {

enum class ConsumerKind : uint8_t { linear, embedding, norm, attention };

struct Consumer {
  ConsumerKind kind;
  at::Tensor weight;  // what the consuming op is found by; undefined: a norm without parameters
  at::Tensor bias;    // undefined: none
  Role role;
};

/// None where `module` is none of them.
std::optional<Consumer> consumer_of(torch::nn::Module& module);

/// While alive errors call the module that a style is applied to by `path`; "" is the root.
class ApplyingTo {
 public:
  explicit ApplyingTo(const std::string& path);
  ~ApplyingTo();
  ApplyingTo(const ApplyingTo&) = delete;
  ApplyingTo& operator=(const ApplyingTo&) = delete;

 private:
  const std::string* previous_;
};

/// "\"blocks.0.fc1\" (torch::nn::LinearImpl)"
std::string described(const torch::nn::Module& module);

/// ValueError where fully_shard has a parameter of `module` or of what is within: a style would have to cut it before.
void check_not_sharded(const torch::nn::Module& module);

/// Every consumer within gets a role where it has none: its parameters are Replicate, plain inputs count as such, and
/// nothing else is asked. Parameters and buffers that are still plain become Replicate.
void place_the_rest(torch::nn::Module& module, const DeviceMesh& mesh);

}  // namespace serried::detail
