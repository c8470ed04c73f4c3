// A linear layer for each expert of this rank, over rows that lie expert after expert.
#pragma once

#include "serried/parallel/expert_parallel/dispatch.h"

namespace serried {

/// Row for row `rows` times the matrix of its expert, plus its bias: [rows, in] to [rows, out]. `weight` [experts, in,
/// out] and `bias` [experts, out] are parameters of all experts, DTensors that are cut along dim 0 over the mesh of
/// `dispatched`, or plain ones of this rank's experts. fully_shard may have cut them further, over other axes.
/// Differentiable, twice.
///     distribute_parameter(w1, mesh["ep"], {Shard(0)});
///     at::Tensor hidden = expert_linear(dispatched.tokens, dispatched, w1);
at::Tensor expert_linear(const at::Tensor& rows, const DispatchedTokens& dispatched, const at::Tensor& weight,
                         const at::Tensor& bias = {});

}  // namespace serried
