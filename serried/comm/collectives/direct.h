// What a backend of ours does on the calling thread, without Work or queue: the fast way for blocking calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace serried::detail {

/// Mixed into a c10d::Backend; found by dynamic_cast. Each call blocks until this rank may use its output and reuse its
/// input. Tensors are contiguous and on the CPU; every rank calls the same thing.
class DirectCollectives {
 public:
  virtual ~DirectCollectives() = default;

  /// `output` may be `input` itself.
  virtual void direct_all_reduce(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& op) = 0;

  /// outputs[p] becomes rank p's input; sizes may differ between ranks, the caller knows them.
  virtual void direct_all_gather(at::TensorList outputs, const at::Tensor& input) = 0;

  /// Rank p's output becomes the reduction of all ranks' inputs[p]; inputs may differ in size between p.
  virtual void direct_reduce_scatter(const at::Tensor& output, at::TensorList inputs, const c10d::ReduceOp& op) = 0;

  /// outputs[p] becomes rank p's inputs[this rank]; empty pieces are fine.
  virtual void direct_all_to_all(at::TensorList outputs, at::TensorList inputs) = 0;

  /// The same with equal pieces that lie in a row in one tensor.
  virtual void direct_all_gather_flat(const at::Tensor& output, const at::Tensor& input) = 0;
  virtual void direct_reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input,
                                          const c10d::ReduceOp& op) = 0;
  virtual void direct_all_to_all_flat(const at::Tensor& output, const at::Tensor& input) = 0;

  virtual void direct_broadcast(const at::Tensor& tensor, int root) = 0;
  virtual void direct_barrier() = 0;
};

}  // namespace serried::detail
