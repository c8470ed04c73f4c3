// Routers of one's own, and experts whose weights are one DTensor.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/expert_parallel/moe.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/expert_parallel/routed.h"

namespace serried::testing {
namespace {

using namespace routed;

// Expert e makes (e + 1) x + e of a token.
at::Tensor affine(const DispatchedTokens& sent, int64_t first) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& rows : sent.tokens.split_with_sizes(sent.counts)) {
    const int64_t expert = first + int64_t(results.size());
    results.push_back(rows * double(expert + 1) + double(expert));
  }
  return at::cat(results);
}

TEST(DispatchTokens, BringsAnyChoicesThereAndBack) {
  for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{5}, {4, 0}, {3, 6, 2}, {1, 0, 5, 2}}) {
    const int64_t ranks = int64_t(tokens.size()), num_experts = 2 * ranks;
    const Case c{.tokens = tokens, .num_experts = num_experts};
    run_ranks(int(ranks), [&](const Group& group) {
      const int64_t rank = group->getRank(), count = tokens[size_t(rank)];
      // The second choice is the first one again for every third token.
      const at::Tensor places = at::arange(count);
      const at::Tensor first = (places * 5 + rank).remainder(num_experts);
      const at::Tensor second = at::where(places.remainder(3) == 0, first, (first + 1).remainder(num_experts));
      const at::Tensor experts = at::stack({first, second}, 1);
      const at::Tensor x = tokens_of(c, rank).requires_grad_();
      const at::Tensor weights = values(c, {count, 2}, 9).sigmoid().requires_grad_();
      const DispatchedTokens sent = dispatch_tokens(x, experts, num_experts, {.mesh = expert_mesh(group)});
      EXPECT_EQ(std::accumulate(sent.counts.begin(), sent.counts.end(), int64_t(0)), sent.tokens.size(0));
      expect_equal(sent.tokens_per_expert, at::bincount(experts.flatten(), {}, num_experts));
      EXPECT_EQ(sent.dropped.item<int64_t>(), 0);
      const at::Tensor y = combine_tokens(affine(sent, rank * 2), sent, weights);
      const at::Tensor plain_x = x.detach().requires_grad_(), plain_weights = weights.detach().requires_grad_();
      const at::Tensor chosen = experts.unsqueeze(-1);
      const at::Tensor due = ((plain_x.unsqueeze(1) * (chosen + 1) + chosen) * plain_weights.unsqueeze(-1)).sum(1);
      expect_near(y, due, 1e-9, "y");
      (y * weights_of(c, rank)).sum().backward();
      (due * weights_of(c, rank)).sum().backward();
      expect_near(x.grad(), plain_x.grad(), 1e-9, "x");
      expect_near(weights.grad(), plain_weights.grad(), 1e-9, "weights");
    });
  }
}

TEST(DispatchTokens, RowsLieByExpertThenRankThenToken) {
  run_ranks(2, [](const Group& group) {
    const double rank = double(group->getRank());
    const at::Tensor x = torch::tensor({{10 * rank}, {10 * rank + 1}, {10 * rank + 2}});
    const at::Tensor experts = torch::tensor({{3}, {0}, {3}});
    const DispatchedTokens sent = dispatch_tokens(x, experts, 4);
    const bool is_first = group->getRank() == 0;
    EXPECT_EQ(sent.counts, is_first ? std::vector<int64_t>({2, 0}) : std::vector<int64_t>({0, 4}));
    expect_equal(sent.tokens.flatten(), is_first ? torch::tensor({1., 11.}) : torch::tensor({0., 2., 10., 12.}));
    const DispatchedTokens few = dispatch_tokens(x, experts, 4, {.capacity = 1.0});  // room for one
    EXPECT_EQ(few.counts, std::vector<int64_t>({2, 2}));
    expect_equal(few.tokens.flatten(), is_first ? torch::tensor({1., 11., 0., 0.}) : torch::tensor({0., 0., 0., 10.}));
    EXPECT_EQ(few.dropped.item<int64_t>(), 1);
    expect_equal(few.tokens_per_expert, torch::tensor({1, 0, 0, 2}));
    expect_equal(combine_tokens(few.tokens, few, at::ones({3, 1}, at::kDouble)).flatten(),
                 torch::tensor({10 * rank, 10 * rank + 1, 0.}));
  });
}

struct Stacked {
  at::Tensor up, up_bias, down, down_bias;  // of all experts
  std::vector<at::Tensor> all() const { return {up, up_bias, down, down_bias}; }
};

Stacked stack(const Case& c) {
  std::vector<std::vector<at::Tensor>> parts(4);
  for (const Expert& expert : all_experts(c)) {
    for (size_t i = 0; i < 4; ++i) {
      const at::Tensor p = expert->parameters()[i].detach();
      parts[i].push_back(p.dim() == 2 ? p.t() : p);
    }
  }
  return {at::stack(parts[0]), at::stack(parts[1]), at::stack(parts[2]), at::stack(parts[3])};
}

at::Tensor computed(const Stacked& w, const DispatchedTokens& sent) {
  const at::Tensor hidden = at::tanh(expert_linear(sent.tokens, sent, w.up, w.up_bias));
  return expert_linear(hidden, sent, w.down, w.down_bias);
}

TEST(ExpertLinear, WithOneDTensorForAllExpertsIsThatOfModules) {
  for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{5}, {4, 0}, {3, 6, 2}}) {
    for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(0.8)}) {
      const int64_t ranks = int64_t(tokens.size());
      const Case c{.tokens = tokens, .num_experts = 2 * ranks, .top_k = 2, .capacity = capacity};
      const Expected due = expected_of(c);
      run_ranks(int(ranks), [&](const Group& group) {
        const DeviceMesh mesh = expert_mesh(group);
        const int64_t rank = group->getRank();
        for (const bool is_distributed : {true, false}) {
          Stacked w = stack(c);
          for (at::Tensor* t : {&w.up, &w.up_bias, &w.down, &w.down_bias}) {
            *t = is_distributed ? at::Tensor(distribute_tensor(*t, mesh, {Shard(0)}))
                                : t->narrow(0, 2 * rank, 2).clone();
            t->requires_grad_();
          }
          const at::Tensor x = tokens_of(c, rank).requires_grad_();
          CommDebugMode comm;
          const at::Tensor y =
              moe(x, logits_of(c, rank), [&](const DispatchedTokens& sent) { return computed(w, sent); },
                  {.mesh = mesh, .top_k = 2, .capacity = capacity});
          expect_near(y, due.y[size_t(rank)], 1e-9, c.text());
          (y * weights_of(c, rank)).sum().backward();
          EXPECT_EQ(comm.count(), ranks == 1 ? 0 : 4);
          expect_near(x.grad(), due.of_x[size_t(rank)], 1e-9, "x");
          for (size_t i = 0; i < 4; ++i) {
            const at::Tensor grad = w.all()[i].grad();
            EXPECT_EQ(is_dtensor(grad), is_distributed);
            const at::Tensor local = is_distributed ? DTensor(grad).to_local() : grad;
            for (int64_t expert = 0; expert < 2; ++expert) {
              const at::Tensor of = due.of_experts[size_t(2 * rank + expert)][i];
              expect_near(local[expert], of.dim() == 2 ? of.t() : of, 1e-9, c10::str("weight ", i));
            }
          }
        }
      });
    }
  }
}

// Whether groups of rows are equal, which data decides, changes nothing.
TEST(ExpertLinear, ComputesInTheDtypeOfItsWeightsUnderAutocast) {
  for (const std::vector<int64_t>& chosen : {std::vector<int64_t>{0, 1, 0, 1}, {0, 0, 0, 1}}) {
    run_ranks(1, [&](const Group&) {
      const at::Tensor w = models::values({2, kWidth, 3}, 1).to(at::kFloat), bias = models::values({2, 3}, 2);
      const at::Tensor x = models::values({4, kWidth}, 3).to(at::kFloat);
      const auto gradients = [&](bool is_cast) {
        const at::Tensor weight = w.clone().requires_grad_(), add = bias.to(at::kFloat).requires_grad_();
        const DispatchedTokens sent = dispatch_tokens(x, torch::tensor(chosen).unsqueeze(1), 2);
        const at::Tensor rows = (is_cast ? sent.tokens.to(at::kBFloat16) : sent.tokens).detach().requires_grad_();
        at::autocast::set_autocast_enabled(at::kCPU, is_cast);
        const at::Tensor y = expert_linear(rows, sent, weight, add);
        at::autocast::set_autocast_enabled(at::kCPU, false);
        EXPECT_EQ(y.scalar_type(), at::kFloat);
        y.square().sum().backward();
        EXPECT_EQ(rows.grad().scalar_type(), rows.scalar_type());
        return std::vector<at::Tensor>{y.detach(), weight.grad(), add.grad()};
      };
      const auto actual = gradients(true), expected = gradients(false);
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(actual[i], expected[i], 0.03, 0.03)) << chosen;
    });
  }
}

TEST(ExpertLinear, IsDifferentiableTwice) {
  const Case c{.tokens = {5}, .num_experts = 3, .top_k = 2};
  run_ranks(1, [&](const Group&) {
    const Stacked w = stack(c);
    const at::Tensor experts = (at::arange(5) * 2).remainder(3).unsqueeze(1);
    const auto second = [&](auto multiply) {
      const at::Tensor x = tokens_of(c, 0).requires_grad_(), up = w.up.detach().requires_grad_(),
                       bias = w.up_bias.detach().requires_grad_();
      at::Tensor sum = at::zeros({}, at::kDouble);
      const auto first = torch::autograd::grad({multiply(x, up, bias).pow(3).sum()}, {x, up, bias}, {}, true, true);
      for (const at::Tensor& grad : first) sum = sum + grad.pow(2).sum();
      return torch::autograd::grad({sum}, {x, up, bias});
    };
    const auto actual = second([&](const at::Tensor& x, const at::Tensor& up, const at::Tensor& bias) {
      const DispatchedTokens sent = dispatch_tokens(x, experts, 3);
      return expert_linear(sent.tokens, sent, up, bias);
    });
    const auto expected = second([&](const at::Tensor& x, const at::Tensor& up, const at::Tensor& bias) {
      const at::Tensor of = experts.flatten();
      return at::bmm(x.unsqueeze(1), up.index_select(0, of)).squeeze(1) + bias.index_select(0, of);
    });
    for (size_t i = 0; i < 3; ++i) expect_near(actual[i], expected[i], 1e-9, std::to_string(i));
  });
}

}  // namespace
}  // namespace serried::testing
