// What collectives mean, in plain LibTorch: all ranks' inputs in, the result out.
#pragma once

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

namespace serried::testing {

/// The reduction of the ranks' tensors, in rank order. Short floats are added up in float; averages of integers are cut
/// towards zero.
at::Tensor reduced(c10d::ReduceOp::RedOpType op, const std::vector<at::Tensor>& xs);

/// How many of `size` each of `n` ranks gets: ceilings, the last ranks less or nothing.
std::vector<int64_t> shard_sizes(int64_t size, int n);

}  // namespace serried::testing
