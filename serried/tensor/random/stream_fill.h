// Fills a part with the numbers that plain LibTorch would draw for the whole tensor.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "serried/tensor/random/owned_runs.h"

namespace serried::detail {

/// An in-place random op of ATen without its tensor and generator: "aten::normal_" with mean and std.
struct StreamOp {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // those between self and generator
};

/// The op called `name`, such as "aten::random_" "from"; the schema must be (self, ..., *, generator).
StreamOp stream_op(const char* name, const char* overload, std::vector<c10::IValue> arguments);

/// Fills `local`, this rank's part as `placed` says, with what `op` on a tensor of its sizes and strides would give
/// there, bit for bit, and moves the generator on as far. Needs a buffer of 64 Ki numbers beside the part; walks the
/// stream of the whole tensor, about 1 ns for each number of another rank.
void stream_fill(const at::Tensor& local, const PlacedPart& placed, const StreamOp& op, const at::Generator& generator);

}  // namespace serried::detail
