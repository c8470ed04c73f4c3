// moe beside the same routing in one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "tests/parallel/expert_parallel/routed.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using namespace routed;

void expect_all_like_alone(const Case& c) {
  const Expected due = expected_of(c);
  run_ranks(int(c.num_ranks()), [&](const Group& group) { expect_like_alone(c, due, group); });
}

const std::vector<std::vector<int64_t>> kTokensOfRanks = {{6}, {5, 3}, {0, 4}, {3, 0, 7}, {2, 5, 0, 1}};

TEST(Moe, IsTheSameRoutingInOneProcess) {
  for (const std::vector<int64_t>& tokens : kTokensOfRanks) {
    for (const int64_t num_local : {1, 2, 3}) {
      const int64_t num_experts = num_local * int64_t(tokens.size());
      for (const int64_t top_k : {int64_t(1), std::min<int64_t>(2, num_experts), num_experts}) {
        expect_all_like_alone({.tokens = tokens, .num_experts = num_experts, .top_k = top_k});
      }
    }
  }
}

TEST(Moe, OfFloatsIsTheSameToSixDigits) {
  for (const std::vector<int64_t>& tokens : kTokensOfRanks) {
    const Case c{.tokens = tokens, .num_experts = 2 * int64_t(tokens.size()), .top_k = 2, .dtype = at::kFloat};
    expect_all_like_alone(c);
  }
}

TEST(Moe, WithACapacityDropsWhatComesLate) {
  for (const std::vector<int64_t>& tokens : kTokensOfRanks) {
    for (const double capacity : {0.3, 1.0, 1.25, 50.0}) {
      for (const int64_t top_k : {1, 2}) {
        const int64_t num_experts = 2 * int64_t(tokens.size());
        expect_all_like_alone({.tokens = tokens, .num_experts = num_experts, .top_k = top_k, .capacity = capacity});
      }
    }
  }
  const Case tight{.tokens = {8, 8}, .num_experts = 4, .top_k = 2, .capacity = 0.5, .unused = {1, 2}};
  expect_all_like_alone(tight);
  EXPECT_EQ(expected_of(tight).alone[0].dropped, 12);  // two experts take two tokens each of eight
}

TEST(Moe, ExpertsThatNobodyChoosesGetNothing) {
  for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(1.5)}) {
    expect_all_like_alone({.tokens = {4, 6}, .num_experts = 4, .top_k = 1, .capacity = capacity, .unused = {0, 3}});
    expect_all_like_alone({.tokens = {4, 6}, .num_experts = 4, .top_k = 2, .capacity = capacity, .unused = {2, 3}});
    expect_all_like_alone({.tokens = {0, 0, 0}, .num_experts = 6, .top_k = 2, .capacity = capacity});
  }
}

TEST(Moe, OfEqualLogitsTakesTheFirstExpert) {
  run_ranks(2, [](const Group& group) {
    const Case c{.tokens = {3, 3}, .num_experts = 4};
    for (const int64_t top_k : {1, 2, 4}) {
      MoeLoad load;
      moe(tokens_of(c, group->getRank()), at::zeros({3, 4}, at::kDouble), experts_of(c, group->getRank()),
          {.top_k = top_k, .load = &load});
      expect_equal(load.tokens_per_expert, (at::arange(4) < top_k) * 3);
    }
  });
}

TEST(Moe, TokensMayHaveAnyDims) {
  const Case c{.tokens = {6, 6}, .num_experts = 4, .top_k = 2};
  const Expected due = expected_of(c);
  run_ranks(2, [&](const Group& group) {
    const int64_t rank = group->getRank();
    const at::Tensor x = tokens_of(c, rank), logits = logits_of(c, rank);
    const auto experts = experts_of(c, rank);
    const MoeOptions options{.top_k = 2};
    const at::Tensor expected = due.y[size_t(rank)].view({2, 3, kWidth});
    expect_near(moe(x.view({2, 3, kWidth}), logits, experts, options), expected, 1e-9, "flat logits");
    expect_near(moe(x.view({2, 3, kWidth}), logits.view({2, 3, 4}), experts, options), expected, 1e-9, "as x");
    const at::Tensor turned = x.view({2, 3, kWidth}).transpose(0, 1);
    expect_near(moe(turned, logits.view({2, 3, 4}).transpose(0, 1), experts, options), expected.transpose(0, 1), 1e-9,
                "turned");
    const at::Tensor none = at::empty({2, 0, kWidth}, at::kDouble);
    EXPECT_EQ(moe(none, at::empty({2, 0, 4}, at::kDouble), experts, options).sizes(), none.sizes());
    EXPECT_EQ(moe(none, at::empty({0, 4}, at::kDouble), experts, options).sizes(), none.sizes());
  });
}

TEST(Moe, OfADTensorCutAlongItsTokensIsOneLikeIt) {
  const Case alone{.tokens = {7}, .num_experts = 6, .top_k = 2};
  const Expected due = expected_of(alone);
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      const Case c{.tokens = std::vector<int64_t>(size_t(ranks), 7), .num_experts = 6, .top_k = 2};
      const at::Tensor whole_x = tokens_of(alone, 0), whole = logits_of(alone, 0);
      for (const Placements& placements : {Placements{Shard(0)}, Placements{Replicate()}}) {
        const at::Tensor x = at::Tensor(distribute_tensor(whole_x, mesh, {Shard(0)})).requires_grad_();
        const at::Tensor logits = at::Tensor(distribute_tensor(whole, mesh, placements)).requires_grad_();
        const auto experts = experts_of(c, mesh.get_local_rank());
        const DTensor y(moe(x, logits, experts, {.mesh = mesh, .top_k = 2}));
        EXPECT_EQ(to_string(y.placements()), "S0");
        expect_near(y.full_tensor(), due.y[0], 1e-9, "y");
        (y * distribute_tensor(weights_of(alone, 0), mesh, {Shard(0)})).sum().backward();
        expect_near(full(x.grad()), due.of_x[0], 1e-9, "x");
        expect_near(full(logits.grad()), due.of_logits[0], 1e-9, "logits");
        for (size_t i = 0; i < experts.size(); ++i) {
          const size_t number = size_t(mesh.get_local_rank()) * experts.size() + i;
          expect_near(experts[i].ptr()->parameters()[0].grad(), due.of_experts[number][0], 1e-9, "expert");
        }
      }
      const DTensor deep = distribute_tensor(whole_x.view({1, 7, kWidth}), mesh, {Shard(1)});
      const DTensor deep_logits = distribute_tensor(whole.view({1, 7, 6}), mesh, {Shard(1)});
      const DTensor y(moe(deep, deep_logits, experts_of(c, mesh.get_local_rank()), {.mesh = mesh, .top_k = 2}));
      expect_near(y.full_tensor(), due.y[0].unsqueeze(0), 1e-9, "cut along dim 1");
    });
  }
}

// With one choice all weights are 1, but for those of a router that has lost its numbers: nobody is to go on with
// these.
TEST(Moe, ANanOfTheRouterIsSeenInTheResult) {
  run_ranks(2, [](const Group& group) {
    const Case c{.tokens = {4, 4}, .num_experts = 4};
    for (const int64_t top_k : {1, 2}) {
      at::Tensor logits = logits_of(c, group->getRank());
      logits[1][2] = std::numeric_limits<double>::quiet_NaN();
      const at::Tensor y =
          moe(tokens_of(c, group->getRank()), logits, experts_of(c, group->getRank()), {.top_k = top_k});
      expect_equal(y.isnan().all(-1), at::arange(4) == 1);
    }
  });
}

// All second derivatives: of the squares of all first ones, added up over ranks.
TEST(Moe, IsDifferentiableTwice) {
  for (const Case& c : {Case{.tokens = {3, 4}, .num_experts = 4, .top_k = 2},
                        Case{.tokens = {3, 4}, .num_experts = 4, .top_k = 2, .capacity = 0.75},
                        Case{.tokens = {3, 4}, .num_experts = 2, .top_k = 1}}) {
    const auto twice = [](const std::vector<at::Tensor>& leaves, const at::Tensor& loss) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const at::Tensor& grad : torch::autograd::grad({loss}, leaves, {}, true, true))
        sum = sum + grad.pow(3).sum();
      sum.backward();
    };
    std::vector<Expert> all = all_experts(c);
    std::vector<at::Tensor> leaves;
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int64_t rank = 0; rank < 2; ++rank) {
      leaves.push_back(tokens_of(c, rank).requires_grad_());
      leaves.push_back(logits_of(c, rank).requires_grad_());
      const Alone alone = run_alone(c, all, leaves[size_t(2 * rank)], leaves[size_t(2 * rank) + 1]);
      loss = loss + (alone.y.pow(3) * weights_of(c, rank)).sum();
    }
    for (const Expert& expert : all) {
      for (const at::Tensor& p : expert->parameters()) leaves.push_back(p);
    }
    twice(leaves, loss);
    run_ranks(2, [&](const Group& group) {
      const int64_t rank = group->getRank();
      const at::Tensor x = tokens_of(c, rank).requires_grad_(), logits = logits_of(c, rank).requires_grad_();
      const auto experts = experts_of(c, rank);
      std::vector<at::Tensor> mine = {x, logits};
      for (const auto& expert : experts) {
        for (const at::Tensor& p : expert.ptr()->parameters()) mine.push_back(p);
      }
      const at::Tensor y = moe(x, logits, experts, {.top_k = c.top_k, .capacity = c.capacity});
      twice(mine, (y.pow(3) * weights_of(c, rank)).sum());
      expect_near(x.grad(), leaves[size_t(2 * rank)].grad(), 1e-9, "x");
      expect_near(logits.grad(), leaves[size_t(2 * rank) + 1].grad(), 1e-9, "logits");
      for (size_t i = 2; i < mine.size(); ++i) {
        expect_near(mine[i].grad(), leaves[4 + size_t(rank) * (mine.size() - 2) + i - 2].grad(), 1e-9, "weights");
      }
    });
  }
}

TEST(Moe, ForwardAndBackwardAreTwoExchangesEach) {
  for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(1.0)}) {
    for (const int64_t ranks : {1, 2, 4}) {
      run_ranks(int(ranks), [&](const Group& group) {
        const Case c{.tokens = std::vector<int64_t>(size_t(ranks), 6), .num_experts = 2 * ranks, .top_k = 2};
        const auto experts = experts_of(c, group->getRank());
        const auto calls = [&](bool wants_gradient) {
          const at::Tensor x = tokens_of(c, group->getRank()).requires_grad_(wants_gradient);
          CommDebugMode comm;
          const at::Tensor y = moe(x, logits_of(c, group->getRank()), experts, {.top_k = 2, .capacity = capacity});
          EXPECT_EQ(comm.count(), ranks == 1 ? 0 : 2);
          y.sum().backward();
          EXPECT_EQ(comm.count(), comm.count("all_to_all"));
          return comm.count();
        };
        EXPECT_EQ(calls(true), ranks == 1 ? 0 : 4);
        EXPECT_EQ(calls(false), ranks == 1 ? 0 : 3);
        if (!capacity) return;
        CommDebugMode comm;  // every row that could be filled is sent: 3 for each of the experts
        moe(tokens_of(c, group->getRank()), logits_of(c, group->getRank()), experts, {.top_k = 2, .capacity = 0.4});
        const int64_t slots = int64_t(std::ceil(0.4 * 6 * 2 / double(2 * ranks)));
        EXPECT_EQ(comm.bytes("all_to_all"), ranks == 1 ? 0 : 2 * 2 * ranks * slots * kWidth * 8);
      });
    }
  }
}

// Whoever needs no gradient still takes part in the backward of those who do.
TEST(Moe, RanksMayNeedDifferentGradients) {
  const Case c{.tokens = {4, 3, 5}, .num_experts = 6, .top_k = 2, .unused = {2, 3}};
  const Expected due = expected_of(c);
  for (const bool trains : {true, false}) {
    run_ranks(3, [&](const Group& group) {
      const int64_t rank = group->getRank();
      const at::Tensor x = tokens_of(c, rank).requires_grad_(rank == 0);
      const at::Tensor logits = logits_of(c, rank).requires_grad_(rank != 2);
      const auto experts = experts_of(c, rank);
      for (const auto& expert : experts) {
        for (const at::Tensor& p : expert.ptr()->parameters()) p.requires_grad_(trains && rank == 2);
      }
      (moe(x, logits, experts, {.top_k = 2}) * weights_of(c, rank)).sum().backward();
      if (rank == 0) expect_near(x.grad(), due.of_x[0], 1e-9, "x");
      EXPECT_EQ(x.grad().defined(), rank == 0);
      if (rank != 2) expect_near(logits.grad(), due.of_logits[size_t(rank)], 1e-9, "logits");
      const at::Tensor of_expert = experts[1].ptr()->parameters()[0].grad();
      EXPECT_EQ(of_expert.defined(), trains && rank == 2);
      if (of_expert.defined()) expect_near(of_expert, due.of_experts[5][0], 1e-9, "expert");
    });
  }
}

TEST(Moe, ExpertsWithoutRowsMayBePassedOver) {
  const Case c{.tokens = {4, 3}, .num_experts = 2, .unused = {1}};
  const Expected due = expected_of(c);
  run_ranks(2, [&](const Group& group) {
    const int64_t rank = group->getRank();
    const at::Tensor x = tokens_of(c, rank).requires_grad_();
    Expert expert(rank);
    const at::Tensor y = moe(x, logits_of(c, rank), [&](const DispatchedTokens& sent) {
      return sent.tokens.size(0) == 0 ? at::zeros_like(sent.tokens) : expert(sent.tokens);
    });
    (y * weights_of(c, rank)).sum().backward();
    expect_near(x.grad(), due.of_x[size_t(rank)], 1e-9, "x");
  });
}

TEST(Moe, AveragesGradientsOfExpertsWhereAsked) {
  for (const int ranks : {1, 2, 3}) {
    const Case c{.tokens = std::vector<int64_t>(size_t(ranks), 4), .num_experts = 2 * ranks, .top_k = 2};
    const Expected due = expected_of(c);
    run_ranks(ranks, [&](const Group& group) {
      const int64_t rank = group->getRank();
      const at::Tensor x = tokens_of(c, rank).requires_grad_(), logits = logits_of(c, rank).requires_grad_();
      const auto experts = experts_of(c, rank);
      (moe(x, logits, experts, {.top_k = 2, .average_gradients = true}) * weights_of(c, rank)).sum().backward();
      expect_near(x.grad(), due.of_x[size_t(rank)], 1e-9, "x");
      expect_near(logits.grad(), due.of_logits[size_t(rank)], 1e-9, "logits");
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor expected = due.of_experts[size_t(2 * rank) + i][0] / double(ranks);
        expect_near(experts[i].ptr()->parameters()[0].grad(), expected, 1e-9, "expert");
      }
    });
  }
}

TEST(Moe, TokensOfALowerPrecisionKeepTheirDtype) {
  run_ranks(2, [](const Group& group) {
    const Case c{.tokens = {4, 3}, .num_experts = 4, .top_k = 2, .dtype = at::kBFloat16};
    const at::Tensor x = tokens_of(c, group->getRank()).requires_grad_();
    const at::Tensor logits = logits_of(c, group->getRank()).to(at::kFloat).requires_grad_();
    const at::Tensor y = moe(x, logits, experts_of(c, group->getRank()), {.top_k = 2});
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(logits.grad().scalar_type(), at::kFloat);
  });
}

TEST(Moe, BalancingLossIsThatOfAllTokens) {
  const Case c{.tokens = {4, 3, 0}, .num_experts = 3, .top_k = 2};
  const auto by_hand = [&](const at::Tensor& logits, const std::vector<int64_t>& chosen) {
    const at::Tensor share = torch::tensor(chosen).to(at::kDouble) / double(7 * 2);
    return 3 * (share * logits.softmax(-1).mean(0)).sum();
  };
  const at::Tensor all = at::cat({logits_of(c, 0), logits_of(c, 1)}).requires_grad_();
  const Expected due = expected_of(c);
  std::vector<int64_t> chosen(3);
  for (size_t i = 0; i < 3; ++i) chosen[i] = due.alone[0].chosen[i] + due.alone[1].chosen[i];
  const at::Tensor expected = by_hand(all, chosen);
  expected.backward();
  run_ranks(3, [&](const Group& group) {
    const int64_t rank = group->getRank();
    const at::Tensor logits = logits_of(c, rank).requires_grad_();
    MoeLoad load;
    moe(tokens_of(c, rank), logits, experts_of(c, rank), {.top_k = 2, .load = &load});
    CommDebugMode comm;
    const at::Tensor loss = load_balancing_loss(logits, load, {.mesh = expert_mesh(group)});
    EXPECT_EQ(comm.count(), 1);
    expect_near(loss, expected.detach(), 1e-12, "loss");
    (loss / 3).backward();  // one loss in the mean of three
    const at::Tensor mine = all.grad().narrow(0, rank == 0 ? 0 : 4, rank == 0 ? 4 : rank == 1 ? 3 : 0).clone();
    expect_near(logits.grad(), rank == 2 ? at::zeros({0, 3}, at::kDouble) : mine, 1e-12, "logits");
  });
}

}  // namespace
}  // namespace serried::testing
