// Numbers to report: means over all samples of all ranks, whatever share of them each rank has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "serried/comm/groups/group.h"

namespace serried {

/// A mean over everything that was added on all ranks. Averages of the ranks' own means are something else where ranks,
/// or batches, have different sizes. Sums are kept in double precision where the values are; `add` communicates nothing
/// and waits for nothing, `compute` is one all-reduce of 16 bytes that every rank calls.
///     Mean loss(world);
///     for (auto& batch : *loader) loss.add(torch::mse_loss(net(batch.data), batch.target), batch.data.size(0));
///     std::cout << loss.compute();
class Mean {
 public:
  explicit Mean(Group process_group = {});  // default: the current group

  /// Each element counts once.
  void add(const at::Tensor& values);
  /// `mean`, a tensor of one element or a number, of `count` samples. With 0 it does not count, though it be NaN.
  void add(const at::Tensor& mean, int64_t count);
  void add(double mean, int64_t count);

  /// The mean so far, on every rank. ValueError where no rank has added anything.
  double compute() const;
  /// How much all ranks have added.
  int64_t count() const;
  /// Begins anew.
  void reset();

 private:
  void add_sum(const at::Tensor& sum, double count);
  at::Tensor totals() const;

  Group group_;
  at::Tensor sums_;  // sum and count of this rank; undefined: nothing yet
};

struct AccuracyOptions {
  Group process_group = {};                            // default: the current group
  int64_t top_k = 1;                                   // right if among the k highest scores
  std::optional<int64_t> ignore_index = std::nullopt;  // targets that do not count
};

/// Which part of all ranks' samples is classified right.
///     Accuracy accuracy({.process_group = world, .top_k = 5});
///     accuracy.add(net(x), y);
class Accuracy {
 public:
  explicit Accuracy(AccuracyOptions options = {});

  /// Scores of [..., classes] or, with top_k 1, classes themselves, beside targets of [...].
  void add(const at::Tensor& predictions, const at::Tensor& targets);

  /// As Mean: between 0 and 1.
  double compute() const { return right_.compute(); }
  int64_t count() const { return right_.count(); }
  void reset() { right_.reset(); }

 private:
  const AccuracyOptions options_;
  Mean right_;
};

}  // namespace serried
