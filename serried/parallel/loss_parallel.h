// The promise that logits stay cut along their classes.
#pragma once

namespace serried {

/// While alive, an op of this thread that would gather the classes it works along raises a ValueError that names the op
/// and the bytes. Softmax, log_softmax, nll_loss and cross_entropy never do, in a scope or not: they work on logits cut
/// along the classes by two all-reduces of one number per row, and one in backward. Nests; the one before holds again
/// after it, exceptions included. Backward may run inside or after the scope.
///     { LossParallel guard; torch::nn::functional::cross_entropy(logits, target).backward(); }
class LossParallel {
 public:
  explicit LossParallel(bool enabled = true);
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;
  static bool is_enabled();

 private:
  bool previous_;
};

}  // namespace serried
