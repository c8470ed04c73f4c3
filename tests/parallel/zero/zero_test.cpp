// ZeroRedundancyOptimizer against an ordinary optimizer over all parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/zero.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::expect_close;
using testing::expect_equal;
using torch::optim::OptimizerParamGroup;
using Parameters = std::vector<at::Tensor>;

// Shapes whose sizes differ, so that ranks get different numbers of them.
const std::vector<std::vector<int64_t>> kZeroShapes = {{4, 3}, {7}, {5}, {2, 2}, {}, {3, 1, 2}};

at::Tensor zero_values(at::IntArrayRef sizes, double salt, at::ScalarType dtype = at::kFloat) {
  const int64_t count = c10::multiply_integers(sizes);
  return at::arange(count, at::kDouble).add(salt).mul(1.7).sin().view(sizes).to(dtype);
}

Parameters zero_parameters(const std::vector<std::vector<int64_t>>& shapes = kZeroShapes,
                           at::ScalarType dtype = at::kFloat) {
  Parameters parameters;
  for (const auto& sizes : shapes) {
    parameters.push_back(zero_values(sizes, double(parameters.size()), dtype).requires_grad_());
  }
  return parameters;
}

// The averaged gradients of step `index`: the same on every rank.
void zero_gradients(const Parameters& parameters, int index) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() =
        zero_values(parameters[i].sizes(), 31.0 * index + double(i), parameters[i].scalar_type());
  }
}

void zero_steps(torch::optim::Optimizer& optimizer, const Parameters& parameters, int begin, int end) {
  for (int index = begin; index < end; ++index) {
    zero_gradients(parameters, index);
    optimizer.step();
  }
}

void expect_same_parameters(const Parameters& actual, const Parameters& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], "parameter " + std::to_string(i));
}

template <class Local, class Options>
void expect_equals_plain(const Group& group, const Options& options, bool as_views) {
  const Parameters sharded = zero_parameters();
  const Parameters whole = zero_parameters();
  ZeroRedundancyOptimizer<Local> zero(sharded, options,
                                      {.process_group = group, .parameters_as_bucket_view = as_views});
  Local plain(whole, options);
  zero_steps(zero, sharded, 0, 5);
  zero_steps(plain, whole, 0, 5);
  expect_same_parameters(sharded, whole);
}

class Zero : public testing::OnRanks {};

TEST_P(Zero, FiveStepsOfEveryOptimizerEqualThePlainOneBitForBit) {
  using namespace torch::optim;
  on_ranks([](const Group& g) {
    for (bool as_views : {false, true}) {
      expect_equals_plain<AdamW>(g, AdamWOptions(0.1).weight_decay(0.3), as_views);
      expect_equals_plain<Adam>(g, AdamOptions(0.1).amsgrad(true), as_views);
      expect_equals_plain<SGD>(g, SGDOptions(0.1).momentum(0.9).nesterov(true), as_views);
      expect_equals_plain<Adagrad>(g, AdagradOptions(0.1).initial_accumulator_value(0.5), as_views);
      expect_equals_plain<RMSprop>(g, RMSpropOptions(0.1).momentum(0.5).centered(true), as_views);
    }
  });
}

TEST_P(Zero, ConsolidatesOnAnyRank) {
  on_ranks([&](const Group& g) {
    const Parameters sharded = zero_parameters();
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(sharded, 0.1, {.process_group = g});
    zero_steps(zero, sharded, 0, 2);
    const int to = world_size() - 1;
    zero.consolidate_state_dict(to);
    EXPECT_EQ(zero.state().size(), g->getRank() == to ? sharded.size() : 0u);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Zero, ::testing::ValuesIn(testing::settings({1, 2, 4})), testing::name_of);

TEST(ZeroOptimizer, TrainsLikeOneProcessOnTheWholeBatch) {
  const at::Tensor x = zero_values({6, 4}, 0.5);
  const auto make_net = [] {
    return seeded(
        0, [] { return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Tanh(), torch::nn::Linear(5, 1)); });
  };
  auto whole = make_net();
  torch::optim::AdamW plain(whole->parameters(), 0.05);
  for (int i = 0; i < 5; ++i) {
    plain.zero_grad();
    whole->forward(x).square().mean().backward();
    plain.step();
  }
  run_ranks(3, [&](const Group& g) {
    auto net = make_net();
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(net->parameters(), 0.05, {.process_group = g});
    for (int i = 0; i < 5; ++i) {
      zero.zero_grad();
      net->forward(x.chunk(3)[size_t(g->getRank())]).square().mean().backward();
      for (const at::Tensor& p : net->parameters()) all_reduce_(p.grad(), g, c10d::ReduceOp::AVG);
      zero.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) expect_close(net->parameters()[i], whole->parameters()[i]);
  });
}

TEST(ZeroOptimizer, TakesTheParametersOfDistributedDataParallel) {
  run_ranks(2, [](const Group& g) {
    const auto train = [&](auto make_optimizer) {
      auto net = seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2)); });
      DistributedDataParallel ddp(net, {.process_group = g});
      auto optimizer = make_optimizer(ddp.parameters());
      for (int i = 0; i < 4; ++i) {
        optimizer->zero_grad();
        ddp(zero_values({5, 3}, i + 0.3 * g->getRank())).square().sum().backward();
        optimizer->step();
      }
      return net->parameters();
    };
    const Parameters plain = train([](auto p) { return std::make_unique<torch::optim::AdamW>(p, 0.1); });
    for (bool as_views : {false, true}) {
      expect_same_parameters(train([&](auto p) {
                               return std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
                                   p, 0.1, ZeroOptions{.process_group = g, .parameters_as_bucket_view = as_views});
                             }),
                             plain);
    }
  });
}

TEST(ZeroOptimizer, GivesTheLargestFirstToTheRankThatHasLeast) {
  run_ranks(2, [](const Group& g) {
    const Parameters p = zero_parameters({{1}, {4}, {12}, {5}, {7}});
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(p, 0.1, {.process_group = g});
    // 12 | 7, then 5 to 7, then 4 to the first of two 12, then 1 to the 12 that is left.
    EXPECT_EQ((std::vector<int>{zero.owner_of(p[2]), zero.owner_of(p[4]), zero.owner_of(p[3]), zero.owner_of(p[1]),
                                zero.owner_of(p[0])}),
              (std::vector<int>{0, 1, 1, 0, 1}));
  });
}

TEST(ZeroOptimizer, KeepsStateOfItsOwnParametersOnly) {
  std::vector<int64_t> num_bytes(3);
  run_ranks(3, [&](const Group& g) {
    const Parameters p = zero_parameters();
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(p, 0.1, {.process_group = g});
    zero_steps(zero, p, 0, 1);
    const auto& state = zero.local_optimizer().state();
    for (const at::Tensor& parameter : p) {
      const auto found = state.find(parameter.unsafeGetTensorImpl());
      EXPECT_EQ(found != state.end(), zero.owner_of(parameter) == g->getRank());
      if (found == state.end()) continue;
      const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*found->second);
      num_bytes[size_t(g->getRank())] += int64_t(adam.exp_avg().nbytes() + adam.exp_avg_sq().nbytes());
    }
    EXPECT_TRUE(zero.state().empty());
  });
  // 35 elements, 8 bytes each; the largest has 12.
  EXPECT_EQ(std::accumulate(num_bytes.begin(), num_bytes.end(), int64_t{0}), 35 * 8);
  EXPECT_EQ(*std::max_element(num_bytes.begin(), num_bytes.end()), 12 * 8);
}

std::vector<OptimizerParamGroup> zero_groups(const Parameters& p) {
  using torch::optim::AdamWOptions;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Parameters(p.begin(), p.begin() + 2), std::make_unique<AdamWOptions>(AdamWOptions(0.2)));
  groups.emplace_back(Parameters(p.begin() + 2, p.end()),
                      std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.5)));
  return groups;
}

TEST(ZeroOptimizer, GroupsKeepTheirOptionsAndFollowAScheduler) {
  run_ranks(3, [](const Group& g) {
    const Parameters sharded = zero_parameters();
    const Parameters whole = zero_parameters();
    const torch::optim::AdamWOptions defaults(0.07);
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(zero_groups(sharded), defaults, {.process_group = g});
    torch::optim::AdamW plain(zero_groups(whole), defaults);
    torch::optim::StepLR zero_schedule(zero, 2, 0.5);
    torch::optim::StepLR plain_schedule(plain, 2, 0.5);
    for (int i = 0; i < 5; ++i) {
      zero_steps(zero, sharded, i, i + 1);
      zero_steps(plain, whole, i, i + 1);
      zero_schedule.step();
      plain_schedule.step();
    }
    expect_same_parameters(sharded, whole);
  });
}

TEST(ZeroOptimizer, ALearningRateSetOnEveryRankTakesEffect) {
  run_ranks(2, [](const Group& g) {
    const Parameters sharded = zero_parameters();
    const Parameters whole = zero_parameters();
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(sharded, 0.1, {.process_group = g});
    torch::optim::AdamW plain(whole, 0.1);
    for (torch::optim::Optimizer* optimizer :
         {static_cast<torch::optim::Optimizer*>(&zero), static_cast<torch::optim::Optimizer*>(&plain)}) {
      const Parameters parameters = optimizer->param_groups()[0].params();
      zero_steps(*optimizer, parameters, 0, 2);
      optimizer->param_groups()[0].options().set_lr(1e-3);  // the type's own default, not that of this optimizer
      zero_steps(*optimizer, parameters, 2, 4);
    }
    expect_same_parameters(sharded, whole);
  });
}

TEST(ZeroOptimizer, AGroupAddedLaterTrainsLikeThePlainOnes) {
  for (bool as_views : {false, true}) {
    run_ranks(3, [&](const Group& g) {
      const Parameters sharded = zero_parameters();
      const Parameters whole = zero_parameters();
      const Parameters first(sharded.begin(), sharded.begin() + 3);
      ZeroRedundancyOptimizer<torch::optim::Adam> zero(first, 0.1,
                                                       {.process_group = g, .parameters_as_bucket_view = as_views});
      torch::optim::Adam plain(Parameters(whole.begin(), whole.begin() + 3), 0.1);
      zero_steps(zero, sharded, 0, 2);
      zero_steps(plain, whole, 0, 2);
      zero.add_param_group(OptimizerParamGroup(Parameters(sharded.begin() + 3, sharded.begin() + 5)));
      plain.add_param_group(OptimizerParamGroup(Parameters(whole.begin() + 3, whole.begin() + 5)));
      zero_steps(zero, sharded, 2, 4);
      zero_steps(plain, whole, 2, 4);
      // Through the base class too, which knows nothing of ranks.
      static_cast<torch::optim::Optimizer&>(zero).add_param_group(OptimizerParamGroup(Parameters{sharded[5]}));
      plain.add_param_group(OptimizerParamGroup(Parameters{whole[5]}));
      zero_steps(zero, sharded, 4, 6);
      zero_steps(plain, whole, 4, 6);
      expect_same_parameters(sharded, whole);
    });
  }
}

TEST(ZeroOptimizer, AGroupAddedLaterGoesWhereItHadGoneAtOnce) {
  run_ranks(3, [](const Group& g) {
    const Parameters p = zero_parameters();
    std::vector<OptimizerParamGroup> groups = zero_groups(p);
    ZeroRedundancyOptimizer<torch::optim::AdamW> at_once(groups, 0.1, {.process_group = g});
    ZeroRedundancyOptimizer<torch::optim::AdamW> later({groups[0]}, 0.1, {.process_group = g});
    later.add_param_group(groups[1]);
    for (const at::Tensor& parameter : p) EXPECT_EQ(later.owner_of(parameter), at_once.owner_of(parameter));
  });
}

TEST(ZeroOptimizer, AnAddedGroupOfAdagradGetsItsState) {
  run_ranks(2, [](const Group& g) {
    const Parameters p = zero_parameters();
    const Parameters whole = zero_parameters();
    ZeroRedundancyOptimizer<torch::optim::Adagrad> zero(Parameters{p[0]}, 0.1, {.process_group = g});
    zero.add_param_group(OptimizerParamGroup(Parameters(p.begin() + 1, p.end())));
    torch::optim::Adagrad plain(whole, 0.1);
    zero_steps(zero, p, 0, 3);
    zero_steps(plain, whole, 0, 3);
    expect_same_parameters(p, whole);
  });
}

TEST(ZeroOptimizer, RunsTheClosureOnceOnEveryRankAndReturnsItsLoss) {
  run_ranks(4, [](const Group& g) {
    const Parameters p = zero_parameters({{3}, {2}});
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(p, 0.1, {.process_group = g});
    int calls = 0;
    at::NoGradGuard no_grad;
    const at::Tensor loss = zero.step([&] {
      ++calls;
      zero.zero_grad();
      at::Tensor sum = p[0].sum() + p[1].sum();
      sum.backward();
      all_reduce_(p[0].grad(), g, c10d::ReduceOp::AVG);  // ranks without parameters take part
      return sum;
    });
    EXPECT_EQ(calls, 1);
    const Parameters before = zero_parameters({{3}, {2}});
    expect_equal(loss.detach(), (before[0].sum() + before[1].sum()).detach());
    expect_equal(p[0].detach(), (before[0] - 0.1).detach());
    expect_equal(p[1].detach(), (before[1] - 0.1).detach());
    EXPECT_FALSE(zero.step().defined());
  });
}

TEST(ZeroOptimizer, ARankWithoutParametersTakesPart) {
  run_ranks(4, [](const Group& g) {
    for (bool as_views : {false, true}) {
      const Parameters sharded = zero_parameters({{3}, {2}});
      const Parameters whole = zero_parameters({{3}, {2}});
      ZeroRedundancyOptimizer<torch::optim::Adam> zero(sharded, 0.1,
                                                       {.process_group = g, .parameters_as_bucket_view = as_views});
      torch::optim::Adam plain(whole, 0.1);
      zero_steps(zero, sharded, 0, 3);
      zero_steps(plain, whole, 0, 3);
      expect_same_parameters(sharded, whole);
      EXPECT_EQ(zero.local_optimizer().state().size(), g->getRank() < 2 ? 1u : 0u);
      zero.consolidate_state_dict(3);
      EXPECT_EQ(zero.state().size(), g->getRank() == 3 ? 2u : 0u);
    }
  });
}

TEST(ZeroOptimizer, MixesDtypes) {
  run_ranks(3, [](const Group& g) {
    const auto mixed = [] {
      Parameters p = zero_parameters();
      const Parameters more = zero_parameters(kZeroShapes, at::kDouble);
      const Parameters half = zero_parameters({{5}, {3}}, at::kBFloat16);
      p.insert(p.end(), more.begin(), more.end());
      p.insert(p.end(), half.begin(), half.end());
      return p;
    };
    for (bool as_views : {false, true}) {
      const Parameters sharded = mixed();
      const Parameters whole = mixed();
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(sharded, torch::optim::SGDOptions(0.1).momentum(0.9),
                                                      {.process_group = g, .parameters_as_bucket_view = as_views});
      torch::optim::SGD plain(whole, torch::optim::SGDOptions(0.1).momentum(0.9));
      zero_steps(zero, sharded, 0, 3);
      zero_steps(plain, whole, 0, 3);
      expect_same_parameters(sharded, whole);
    }
  });
}

TEST(ZeroOptimizer, TiedWeightsAreUpdatedOnce) {
  run_ranks(2, [](const Group& g) {
    const Parameters p = zero_parameters({{3}, {2}});
    const Parameters whole = zero_parameters({{3}, {2}});
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(Parameters{p[0], p[1], p[0]}, 0.1, {.process_group = g});
    torch::optim::AdamW plain(whole, 0.1);
    zero_steps(zero, p, 0, 3);
    zero_steps(plain, whole, 0, 3);
    expect_same_parameters(p, whole);
  });
}

}  // namespace
}  // namespace serried
