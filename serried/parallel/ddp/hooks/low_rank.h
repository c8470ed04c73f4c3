// The mean of one bucket with its large gradients approximated by products of narrow matrices.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "serried/parallel/ddp/hooks/hooks.h"

namespace serried::hooks::detail {

/// Gradients that are approximated together, each as one matrix. One that is smaller is padded with zeros.
struct Stack {
  std::vector<at::Tensor> gradients;  // flat views of the bucket
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t rank = 0;

  int64_t batch() const { return int64_t(gradients.size()); }
  std::vector<int64_t> sizes() const { return {batch(), rows, cols, rank}; }
};

/// A bucket's gradients by what is done with them.
struct Parts {
  std::vector<Stack> stacks;
  std::vector<at::Tensor> plain;  // flat views: averaged as they are
};

/// What stays of a bucket from one iteration to the next. The tensors stay the same ones, so that a captured iteration
/// finds them.
struct BucketMemory {
  std::vector<std::vector<int64_t>> sizes;  // of the stacks it was made for
  at::ScalarType dtype = at::kFloat;        // of these
  at::Tensor right;                         // the right factors to start from, the same on every rank
  bool is_warm = false;                     // they are those of the last iteration; else to be drawn
  std::vector<at::Tensor> errors;           // per stack: what this rank's gradients had and the result had not

  /// Random factors; no part of a captured iteration, which reads them.
  void draw(uint64_t seed, const at::TensorOptions& options);
  /// After an iteration, or a replay of one. What is no number must not spoil all that follow, and is dropped: every
  /// rank sees the same factors.
  void judge(bool warm_start);
};

/// One run of PowerSGD's algorithm: P = M Q, summed and orthogonalised; Q = M^T P, averaged; the result is P Q^T.
class LowRankMean : public std::enable_shared_from_this<LowRankMean> {
 public:
  /// `group` must outlive the future.
  LowRankMean(const Group& group, at::Tensor buffer, Parts parts, std::shared_ptr<BucketMemory> memory,
              const PowerSGDOptions& options);

  /// Fills the bucket; the future holds its buffer.
  HookFuture run();

 private:
  void lay_out();
  void load();
  void start();
  HookFuture sum_left();
  HookFuture sum_right();
  at::Tensor finish();
  void store(size_t stack);
  void remember();

  const Group& group_;
  const int world_size_;
  const at::Tensor buffer_;
  const Parts parts_;
  const std::shared_ptr<BucketMemory> memory_;
  const PowerSGDOptions options_;

  at::Tensor left_;                   // plain gradients, then every P: what the first sum carries
  at::Tensor right_;                  // every Q
  std::vector<at::Tensor> plain_;     // views of left_
  std::vector<at::Tensor> ps_;        // [batch, rows, rank], views of left_
  std::vector<at::Tensor> qs_;        // [batch, cols, rank], views of right_
  std::vector<at::Tensor> matrices_;  // [batch, rows, cols]
};

/// Makes the columns of each matrix of `matrices` [batch, rows, cols], cols <= rows, orthonormal, in place. They span
/// what they did before; a column that the ones before it already span is replaced. `epsilon` is added to each length
/// before a column is divided by it.
void orthogonalize(const at::Tensor& matrices, double epsilon);

}  // namespace serried::hooks::detail
