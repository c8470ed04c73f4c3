// Memory for whole parameters and for gradients on their way, taken and given back block by block.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::detail {

/// While alive InferenceMode is off: memory of an inference tensor could not serve a training step.
class OrdinaryMode {
 public:
  OrdinaryMode() {
    if (c10::InferenceMode::is_enabled()) off_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

/// Buffers of one purpose that serve one block after the other.
class BufferPool {
 public:
  /// `group`: take the memory that its backend reaches at once; null: ordinary memory.
  explicit BufferPool(Group group) : group_(std::move(group)) {}

  /// A tensor of one dim. Its content is what was there before; new memory is zero.
  at::Tensor take(int64_t num_elements, const at::TensorOptions& options);
  /// What somebody else still holds is left to them.
  void give_back(at::Tensor buffer);

  int64_t bytes_taken() const { return taken_; }
  size_t num_taken() const { return used_.size(); }
  int64_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = taken_; }

 private:
  at::Tensor find(int64_t num_bytes, const at::TensorOptions& options);

  const Group group_;
  std::vector<at::Tensor> free_;  // bytes
  std::vector<at::Tensor> used_;
  int64_t taken_ = 0;
  int64_t peak_ = 0;
};

/// A buffer that goes back to its pool with its scope.
struct Borrowed {
  Borrowed(BufferPool& pool_, at::Tensor tensor_) : pool(pool_), tensor(std::move(tensor_)) {}
  ~Borrowed() {
    if (tensor.defined()) pool.give_back(std::move(tensor));
  }
  Borrowed(const Borrowed&) = delete;

  BufferPool& pool;
  at::Tensor tensor;
};

}  // namespace serried::detail
