// From tensors to the Ops of the engine. Tensors are contiguous and stay alive until the Op is complete.
#pragma once

#include "serried/comm/backends/shm/runner.h"

#include <ATen/core/Tensor.h>

namespace serried::shm {

using RedOpType = c10d::ReduceOp::RedOpType;

/// Who asks: pieces are numbered by rank.
struct Place {
  int rank = 0;
  int world_size = 1;
};

Op all_reduce_op(const at::Tensor& input, const at::Tensor& output, RedOpType op);
Op broadcast_op(const at::Tensor& tensor, int root, Place place);
Op all_gather_op(at::TensorList outputs, const at::Tensor& input, Place place);
Op all_gather_flat_op(const at::Tensor& output, const at::Tensor& input);
/// Rows of `input` go to their places in `output` by a table (rows.h).
Op gather_rows_op(const at::Tensor& output, const at::Tensor& input, at::IntArrayRef rows);
Op reduce_scatter_op(const at::Tensor& output, at::TensorList inputs, RedOpType op, Place place);
Op reduce_scatter_flat_op(const at::Tensor& output, const at::Tensor& input, RedOpType op, Place place);
Op reduce_op(const at::Tensor& tensor, int root, RedOpType op, Place place);
Op gather_op(at::TensorList outputs, const at::Tensor& input, int root, Place place);
Op scatter_op(const at::Tensor& output, at::TensorList inputs, int root, Place place);
Op all_to_all_op(at::TensorList outputs, at::TensorList inputs, Place place);
Op all_to_all_flat_op(const at::Tensor& output, const at::Tensor& input, Place place);
Op barrier_op();

/// How the engine reduces for `op`, and what a rank contributes to that: PREMUL_SUM is a sum of inputs that were
/// multiplied before, which `kept` then holds.
RedOpType engine_op(const c10d::ReduceOp& op);
at::Tensor contributed(const at::Tensor& input, const c10d::ReduceOp& op, std::vector<at::Tensor>& kept);

/// ValueError where `op` has no meaning for `dtype`.
ReduceKernel require_kernel(std::string_view where, at::ScalarType dtype, RedOpType op);

}  // namespace serried::shm
