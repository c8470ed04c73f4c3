// Forwards of a wrapped module, kept so that a backward can be told to come from one of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace serried::detail {

/// One forward, as far as backward needs to know it.
struct ForwardPass {
  std::vector<c10::weak_intrusive_ptr<torch::autograd::Node>> outputs;
  bool synchronise = true;
  uint64_t thread = 0;      // autograd numbers its nodes per thread:
  uint64_t first_node = 0;  // this one and those that follow,
  uint64_t end_node = 0;    // up to here, were made by this forward

  /// The forward that began when the next node was `first_node`, and that has given `outputs` now.
  ForwardPass(const std::vector<at::Tensor>& outputs, uint64_t first_node, bool synchronise);

  bool made(const torch::autograd::Node& node) const;
};

/// The forwards whose graphs may still be there.
class ForwardPasses {
 public:
  using PassPtr = std::shared_ptr<const ForwardPass>;

  void add(PassPtr pass);

  /// Whether the running backward goes through a forward that synchronises. One that does not, because the module was
  /// called without its wrapper, is a matter of this rank alone.
  bool synchronise_this_backward();

  /// After a backward: those that are open may be used again only if their graph was kept.
  void close();

  /// Those since the last `close`.
  const std::vector<PassPtr>& open() const { return open_; }

 private:
  bool goes_through_one() const;

  std::vector<PassPtr> open_;
  std::vector<PassPtr> closed_;
  int decided_task_ = -1;  // the backward that `decision_` is about
  bool decision_ = false;
};

}  // namespace serried::detail
