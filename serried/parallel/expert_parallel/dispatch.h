// Tokens to the ranks that have their experts, and results back: for routers of one's own; moe does both.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "serried/mesh/mesh.h"

namespace serried {

namespace detail {
struct TokenWay;
}

struct DispatchOptions {
  std::optional<DeviceMesh> mesh = {};  // one axis: its ranks hold the experts; none: all ranks of the current group
  /// Of its own tokens a rank sends each expert the first ceil(capacity * tokens * choices / experts); what is dropped
  /// adds nothing. Then nothing is read on the host, and the call can be captured. None: all are sent.
  std::optional<double> capacity = {};
  /// Experts get the gradient of the mean of all ranks' losses, as DDP gives it to what all ranks share; false: of
  /// their sum. Tokens and weights get the same either way.
  bool average_gradients = false;
};

/// What came to this rank, and the way back.
struct DispatchedTokens {
  at::Tensor tokens;             // [rows, d], expert after expert; with capacity, rows that no token fills are zeros
  std::vector<int64_t> counts;   // rows of each of this rank's experts
  at::Tensor tokens_per_expert;  // int64 [all experts]: how often this rank's tokens chose each, dropped or not
  at::Tensor dropped;            // int64, no dims: how many of these choices found no room
  std::shared_ptr<const detail::TokenWay> way;  // for combine_tokens
};

/// Sends each token `x` [..., d] to the experts that `experts` [..., choices] (int64) numbers: of `num_experts`, rank r
/// of n has the r-th n-th. Every rank of the mesh calls it, with as many tokens as it has, or none. Differentiable in
/// `x`, twice. ValueError where a number is none of an expert; with capacity, which reads nothing, a c10::Error.
///     DispatchedTokens sent = dispatch_tokens(x, scores.argmax(-1, true), 8, {.mesh = mesh["ep"]});
///     at::Tensor y = combine_tokens(my_experts(sent.tokens, sent.counts), sent, weights);
DispatchedTokens dispatch_tokens(const at::Tensor& x, const at::Tensor& experts, int64_t num_experts,
                                 DispatchOptions options = {});

/// `results`, one row for each of `dispatched.tokens`, brought back to their tokens and added up there with `weights`
/// [..., choices]: a tensor like the `x` that was dispatched. Every rank calls it. Differentiable in both, twice.
at::Tensor combine_tokens(const at::Tensor& results, const DispatchedTokens& dispatched, const at::Tensor& weights);

}  // namespace serried
