// Parameters in a lower precision while forward and backward run, in full precision outside.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "serried/parallel/ddp/gradient_hooks.h"

namespace serried::detail {

/// Swaps the memory behind parameters: modules, optimizers and autograd keep the tensors they know. A twin lives from
/// one forward to the end of its backward only. Gradients are cast up when the parameters come back.
class LowPrecision : public std::enable_shared_from_this<LowPrecision> {
 public:
  /// All floating parameters of `module` that are not ignored, frozen ones too.
  LowPrecision(const torch::nn::Module& module, const std::set<std::string>& ignored, at::ScalarType dtype);
  ~LowPrecision();
  LowPrecision(const LowPrecision&) = delete;

  /// Apart from construction because hooks hold a weak pointer to this.
  void install_hooks();

  void lower();
  void restore();

  /// Every backward through `outputs` finds the parameters lowered, and leaves them restored, also when it throws.
  void follow(const std::vector<at::Tensor>& outputs);

 private:
  using Node = torch::autograd::Node;

  struct Twin {
    at::Tensor parameter;
    at::Tensor full = {};                       // while lowered
    c10::intrusive_ptr<Node> accumulator = {};  // of gradients in low precision; none: the parameter is frozen
    c10::weak_intrusive_ptr<Node> full_accumulator{c10::intrusive_ptr<Node>()};
  };

  void lower(Twin& twin) const;
  void restore_at_end();

  const at::ScalarType dtype_;
  std::vector<Twin> twins_;
  GradientHooks hooks_;
  bool lowered_ = false;
  bool awaits_end_ = false;
};

/// Casts floating buffers that are not ignored, for good.
void cast_buffers(const torch::nn::Module& module, const std::set<std::string>& ignored, at::ScalarType dtype);

}  // namespace serried::detail
