// fully_shard against plain LibTorch: the same numbers, for models of every kind.
#include "serried/parallel/fsdp/fully_shard.h"

#include <gtest/gtest.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/meta.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

void expect_all_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                      const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str(what, ", parameter ", i));
}

void expect_all_within(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                       const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes());
    EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-9) << what << ", parameter " << i;
  }
}

// What one process gets on the batches of all ranks.
std::vector<at::Tensor> train_alone(Net& net, const std::vector<int64_t>& salts, int num_steps,
                                    const MakeOptimizer& make_optimizer = adamw) {
  const auto optimizer = make_optimizer(net.parameters());
  for (int step = 0; step < num_steps; ++step) {
    optimizer->zero_grad();
    at::Tensor loss = net.loss(salts[0] + 10 * step);
    for (size_t i = 1; i < salts.size(); ++i) loss = loss + net.loss(salts[i] + 10 * step);
    (loss / double(salts.size())).backward();
    optimizer->step();
  }
  return values_of(net);
}

std::vector<at::Tensor> train_sharded(Net& net, int64_t salt, int num_steps,
                                      const MakeOptimizer& make_optimizer = adamw) {
  const auto optimizer = make_optimizer(net.parameters());
  for (int step = 0; step < num_steps; ++step) {
    optimizer->zero_grad();
    net.loss(salt + 10 * step).backward();
    optimizer->step();
  }
  return values_of(net);
}

TEST(FullyShard, ParametersAreDTensorsOfGlobalSizesAndGradientsLieLikeThem) {
  run_ranks(3, [](const Group& group) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); });
    const std::vector<at::Tensor> before = values_of(*net);
    const at::Tensor weight = net->parameters()[0];
    shard_all(*net);
    ASSERT_TRUE(is_dtensor(weight));
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({7, 5}));
    EXPECT_EQ(to_string(DTensor(weight).placements()), "S0");
    EXPECT_EQ(DTensor(weight.detach()).to_local().size(0), group->getRank() < 2 ? 3 : 1);
    expect_all_equal(values_of(*net), before, "after fully_shard");
    const at::Tensor loss = net->loss(1);
    EXPECT_FALSE(is_dtensor(loss));
    loss.backward();
    ASSERT_TRUE(is_dtensor(weight.grad()));
    EXPECT_EQ(weight.grad().sizes(), weight.sizes());
    EXPECT_EQ(to_string(DTensor(weight.grad()).placements()), "S0");
  });
}

TEST(FullyShard, TheSameBatchOnEachRankTrainsBitwiseLikePlain) {
  for (const NamedNet& named : all_nets()) {
    for (int world : {1, 2, 4}) {
      run_ranks(world, [&](const Group&) {
        const NetPtr plain = make(named.make), net = make(named.make);
        shard_all(*net);
        expect_all_equal(train_sharded(*net, 3, 3), train_alone(*plain, {3}, 3),
                         c10::str(named.name, " on ", world, " ranks"));
      });
    }
  }
}

TEST(FullyShard, DifferentBatchesTrainLikeOneProcessOnAllOfThem) {
  for (const NamedNet& named : all_nets()) {
    if (named.name == "Conv") continue;  // its batch norm sees each rank's batch
    for (int world : {2, 3, 4}) {
      run_ranks(world, [&](const Group& group) {
        const NetPtr plain = make(named.make, at::kDouble), net = make(named.make, at::kDouble);
        shard_all(*net);
        std::vector<int64_t> salts;
        for (int r = 0; r < world; ++r) salts.push_back(r);
        expect_all_within(train_sharded(*net, group->getRank(), 3), train_alone(*plain, salts, 3),
                          c10::str(named.name, " on ", world, " ranks"));
      });
    }
  }
}

}  // namespace
}  // namespace serried::testing
