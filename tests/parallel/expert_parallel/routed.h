// Tokens routed to experts over ranks, and the same in one process: a loop over tokens, choices and experts.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "tests/support/close.h"
#include "tests/support/models.h"

namespace serried::testing::routed {

constexpr int64_t kWidth = 5, kHidden = 7;

struct ExpertImpl : torch::nn::Module {
  /// The `number`-th of all experts.
  explicit ExpertImpl(int64_t number, at::ScalarType dtype = at::kDouble) {
    register_module("up", up);
    register_module("down", down);
    const at::NoGradGuard no_grad;
    int64_t salt = 10 * number;
    for (const at::Tensor& p : parameters()) p.copy_(models::values(p.sizes(), ++salt) * 0.5);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up{kWidth, kHidden}, down{kHidden, kWidth};
};
TORCH_MODULE(Expert);

struct Case {
  std::vector<int64_t> tokens;  // of each rank
  int64_t num_experts;
  int64_t top_k = 1;
  std::optional<double> capacity = {};
  at::ScalarType dtype = at::kDouble;
  std::vector<int64_t> unused = {};  // experts that no token chooses

  int64_t num_ranks() const { return int64_t(tokens.size()); }
  int64_t num_local() const { return num_experts / num_ranks(); }
  double tolerance() const { return dtype == at::kDouble ? 1e-9 : 1e-6; }
  std::string text() const {
    return c10::str(tokens, " tokens, ", num_experts, " experts, top ", top_k, ", capacity ", capacity.value_or(0));
  }
};

inline at::Tensor values(const Case& c, at::IntArrayRef sizes, int64_t salt) {
  return models::values(sizes, salt).to(c.dtype);
}
inline at::Tensor tokens_of(const Case& c, int64_t rank) {
  return values(c, {c.tokens[size_t(rank)], kWidth}, 100 + rank);
}
inline at::Tensor logits_of(const Case& c, int64_t rank) {
  at::Tensor logits = values(c, {c.tokens[size_t(rank)], c.num_experts}, 200 + rank) * 2;
  for (const int64_t expert : c.unused) logits.select(1, expert).sub_(50);
  return logits;
}
/// The gradient of a rank's result.
inline at::Tensor weights_of(const Case& c, int64_t rank) {
  return values(c, {c.tokens[size_t(rank)], kWidth}, 300 + rank);
}

inline std::vector<torch::nn::AnyModule> experts_of(const Case& c, int64_t rank) {
  std::vector<torch::nn::AnyModule> experts;
  for (int64_t i = 0; i < c.num_local(); ++i) experts.emplace_back(Expert(rank * c.num_local() + i, c.dtype));
  return experts;
}
inline std::vector<Expert> all_experts(const Case& c) {
  std::vector<Expert> experts;
  for (int64_t i = 0; i < c.num_experts; ++i) experts.emplace_back(i, c.dtype);
  return experts;
}

/// The experts of one token, best first.
inline std::vector<int64_t> choices_of(const at::Tensor& logits, int64_t top_k) {
  std::vector<int64_t> experts(size_t(logits.numel()));
  std::iota(experts.begin(), experts.end(), 0);
  const auto at = [&](int64_t i) { return logits[i].item<double>(); };
  std::stable_sort(experts.begin(), experts.end(), [&](int64_t a, int64_t b) { return at(a) > at(b); });
  experts.resize(size_t(top_k));
  return experts;
}

struct Alone {
  at::Tensor y;
  std::vector<int64_t> chosen;  // by expert
  int64_t dropped = 0;
};

/// What one rank's tokens become, with all experts at hand.
inline Alone run_alone(const Case& c, std::vector<Expert>& experts, const at::Tensor& x, const at::Tensor& logits) {
  Alone result{.y = {}, .chosen = std::vector<int64_t>(size_t(c.num_experts))};
  const double share = c.capacity.value_or(1) * double(x.size(0)) * double(c.top_k) / double(c.num_experts);
  const int64_t room = c.capacity ? int64_t(std::ceil(share)) : x.size(0);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    const std::vector<int64_t> choices = choices_of(logits.detach()[t], c.top_k);
    const at::Tensor weights = logits[t].index_select(0, torch::tensor(choices)).softmax(0);
    at::Tensor sum = (x[t] * 0).unsqueeze(0) + logits[t].sum() * 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      const bool fits = result.chosen[size_t(choices[i])]++ < room;
      result.dropped += !fits;
      if (fits) sum = sum + weights[int64_t(i)] * experts[size_t(choices[i])](x[t].unsqueeze(0));
    }
    rows.push_back(sum);
  }
  result.y = rows.empty() ? x * 1 : at::cat(rows);
  return result;
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                        const std::string& what) {
  ASSERT_TRUE(actual.defined() && expected.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.dtype(), expected.dtype()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance)) << what << ":\n"
                                                                    << actual << "\nexpected:\n"
                                                                    << expected;
}

/// Results and gradients of all ranks, of the sum of (result * weights_of).
struct Expected {
  std::vector<at::Tensor> y, of_x, of_logits;       // by rank
  std::vector<std::vector<at::Tensor>> of_experts;  // by expert
  std::vector<Alone> alone;
};

inline Expected expected_of(const Case& c) {
  Expected all;
  std::vector<Expert> experts = all_experts(c);
  for (int64_t rank = 0; rank < c.num_ranks(); ++rank) {
    const at::Tensor x = tokens_of(c, rank).requires_grad_(), logits = logits_of(c, rank).requires_grad_();
    all.alone.push_back(run_alone(c, experts, x, logits));
    all.y.push_back(all.alone.back().y.detach());
    (all.alone.back().y * weights_of(c, rank)).sum().backward();
    all.of_x.push_back(x.grad());
    all.of_logits.push_back(logits.grad().defined() ? logits.grad() : at::zeros_like(logits));
  }
  for (const Expert& expert : experts) {
    all.of_experts.emplace_back();
    for (const at::Tensor& p : expert->parameters()) {
      all.of_experts.back().push_back(p.grad().defined() ? p.grad() : at::zeros_like(p));
    }
  }
  return all;
}

inline DeviceMesh expert_mesh(const Group& group) {
  return init_device_mesh("cpu", {group->getSize()}, {"ep"}, {.group = group});
}

/// moe on this rank beside the same in one process: result, load and all gradients.
inline void expect_like_alone(const Case& c, const Expected& due, const Group& group) {
  const int64_t rank = group->getRank();
  const at::Tensor x = tokens_of(c, rank).requires_grad_(), logits = logits_of(c, rank).requires_grad_();
  const std::vector<torch::nn::AnyModule> experts = experts_of(c, rank);
  MoeLoad load;
  const at::Tensor y =
      moe(x, logits, experts, {.mesh = expert_mesh(group), .top_k = c.top_k, .capacity = c.capacity, .load = &load});
  expect_near(y, due.y[size_t(rank)], c.tolerance(), c.text());
  expect_equal(load.tokens_per_expert, torch::tensor(due.alone[size_t(rank)].chosen), "chosen");
  EXPECT_EQ(load.dropped.item<int64_t>(), due.alone[size_t(rank)].dropped);
  (y * weights_of(c, rank)).sum().backward();
  expect_near(x.grad(), due.of_x[size_t(rank)], c.tolerance(), "x, " + c.text());
  expect_near(logits.grad(), due.of_logits[size_t(rank)], c.tolerance(), "logits, " + c.text());
  for (size_t i = 0; i < experts.size(); ++i) {
    const auto parameters = experts[i].ptr()->parameters();
    const auto& of_expert = due.of_experts[size_t(rank * c.num_local()) + i];
    for (size_t p = 0; p < parameters.size(); ++p) {
      expect_near(parameters[p].grad(), of_expert[p], c.tolerance(), c10::str("expert ", i, ", ", c.text()));
    }
  }
}

}  // namespace serried::testing::routed
