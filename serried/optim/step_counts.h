// Numbers of steps in tensors: ops read and advance them, so that a captured step counts on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace serried::detail {

/// A number of steps made, on the host and in a 0-dim float tensor that ops advance.
class StepCount {
 public:
  StepCount(int64_t value, at::Device device);

  const at::Tensor& tensor() const { return tensor_; }
  int64_t value() const { return value_; }

  /// Before and after the ops that advance the tensor by one. If they failed in between, the next `begin` writes it
  /// again.
  void begin();
  void end();

 private:
  friend class StepCounts;

  at::Tensor tensor_;
  int64_t value_;
  bool is_written_ = true;
  int num_users_ = 0;
  int num_stepping_ = 0;
};

using StepCountPtr = std::shared_ptr<StepCount>;

/// The counts of an optimizer's parameters. Those that always step together share one: one op counts for all.
class StepCounts {
 public:
  /// The counts of `params` that step now, of which each has made `made` steps before.
  std::vector<StepCountPtr> of(const std::vector<at::Tensor>& params, const std::vector<int64_t>& made);

  /// The tensor of a parameter that has made `made` steps; undefined where `of` would give it another.
  at::Tensor tensor_of(const at::Tensor& param, int64_t made) const;

 private:
  std::unordered_map<const void*, StepCountPtr> by_param_;
};

}  // namespace serried::detail
