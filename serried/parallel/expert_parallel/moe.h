// Mixture of experts: each token is computed by the few experts that its logits choose, wherever these live.
#pragma once

#include <torch/nn/modules/container/any.h>

#include <functional>
#include <optional>
#include <vector>

#include "serried/parallel/expert_parallel/dispatch.h"
#include "serried/parallel/expert_parallel/expert_linear.h"

namespace serried {

/// Of one call on this rank. All stays on the device: nothing was read on the host to fill it.
struct MoeLoad {
  at::Tensor tokens_per_expert;  // int64 [all experts]: how often this rank's tokens chose each, dropped or not
  at::Tensor dropped;            // int64, no dims: how many of these choices found no room
};

struct MoeOptions {
  std::optional<DeviceMesh> mesh = {};  // one axis: its ranks hold the experts; none: all ranks of the current group
  int64_t top_k = 1;                    // experts for each token
  std::optional<double> capacity = {};  // as in DispatchOptions; none: no token is dropped
  MoeLoad* load = nullptr;              // filled by the call
  bool average_gradients = false;       // as in DispatchOptions
};

/// Computes all rows of this rank's experts: `dispatched.tokens`, of which dispatched.counts[i] are for its i-th.
using ExpertFunction = std::function<at::Tensor(const DispatchedTokens& dispatched)>;

/// The sum of what its `top_k` best experts make of each token `x` [..., d], weighted by the softmax of their logits:
/// a tensor like `x`. `logits` are [tokens, all experts] or [..., all experts]; of equal ones the first expert counts
/// more. Rank r has the experts r k to (r + 1) k - 1, here as k modules that take and give [rows, d]; they are called
/// with no rows, too. `x` and `logits` are plain, this rank's own, or both DTensors cut along the tokens. Every rank of
/// the mesh calls it, also one without tokens. Differentiable, twice. Without a capacity it cannot be captured.
///     MoeLoad load;
///     auto y = moe(x, router(x), experts, {.mesh = mesh["ep"], .top_k = 2, .capacity = 1.25, .load = &load});
at::Tensor moe(const at::Tensor& x, const at::Tensor& logits, const std::vector<torch::nn::AnyModule>& experts,
               MoeOptions options = {});

/// The same with one function for all experts of this rank: for weights [all experts, ...] that are cut along dim 0.
///     auto y = moe(x, logits, [&](const DispatchedTokens& sent) {
///       return expert_linear(at::gelu(expert_linear(sent.tokens, sent, w1)), sent, w2);
///     }, {.mesh = mesh["ep"], .top_k = 2});
at::Tensor moe(const at::Tensor& x, const at::Tensor& logits, const ExpertFunction& experts, MoeOptions options = {});

struct LoadBalancingOptions {
  std::optional<DeviceMesh> mesh = {};  // all ranks that have tokens, any axes; none: those of the current group
};

/// The auxiliary loss that spreads tokens over experts: E * sum over experts of (their share of all choices) * (mean
/// probability), over the tokens of all ranks of the mesh. 1 where all are alike, E where one gets all. Every rank
/// calls it and gets the same number. Differentiable through the probabilities: where each rank adds it to a loss of
/// its own and gradients are averaged, it counts once.
///     loss = loss + 0.01 * load_balancing_loss(logits, load, {.mesh = mesh});
at::Tensor load_balancing_loss(const at::Tensor& logits, const MoeLoad& load, LoadBalancingOptions options = {});

}  // namespace serried
