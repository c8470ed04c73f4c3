// State in memory, from one arrangement of ranks to another.
#include "serried/checkpoint/state_dict.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/zero.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using checkpoint::StateDict;
using sharded::Mlp;
using sharded::NetPtr;
using sharded::values_of;

NetPtr make_net() {
  return sharded::make([] { return std::make_shared<Mlp>(); }, at::kDouble);
}

void step_of(sharded::Net& net, torch::optim::Optimizer& optimizer, int64_t salt) {
  optimizer.zero_grad();
  net.loss(salt).backward();
  optimizer.step();
}

void expect_values(const sharded::Net& net, const std::vector<at::Tensor>& expected, const std::string& what) {
  const std::vector<at::Tensor> values = values_of(net);
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE((values[i] - expected[i]).abs().max().item<double>(), 1e-9) << what << ", parameter " << i;
  }
}

// Of one process: the state after two steps, and the parameters after four.
struct Reference {
  StateDict state;
  std::vector<at::Tensor> later;
};

Reference reference() {
  const NetPtr net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
  for (int64_t salt = 0; salt < 2; ++salt) step_of(*net, optimizer, salt);
  Reference made;
  made.state = checkpoint::get_state({{"model", state_of(*net)}, {"optim", state_of(optimizer)}, {"step", 2}});
  for (int64_t salt = 2; salt < 4; ++salt) step_of(*net, optimizer, salt);
  made.later = values_of(*net);
  return made;
}

TEST(StateInMemory, HasNamesThatDoNotDependOnTheRanks) {
  const Reference expected = reference();
  run_ranks(3, [&](const Group&) {
    const NetPtr net = make_net();
    sharded::shard_all(*net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    for (int64_t salt = 0; salt < 2; ++salt) step_of(*net, optimizer, salt);
    const StateDict state = checkpoint::get_state({{"model", state_of(*net)}, {"optim", state_of(optimizer)}});
    for (const char* entry : {"model", "optim"}) {
      const auto& theirs = expected.state.at(entry).tensors;
      ASSERT_EQ(state.at(entry).tensors.size(), theirs.size());
      for (const auto& [name, tensor] : state.at(entry).tensors) {
        EXPECT_FALSE(is_dtensor(tensor));
        expect_close(tensor, theirs.at(name), name);
      }
    }
    EXPECT_EQ(state.at("optim").tensors.count("first.weight.exp_avg"), 1u);
  });
}

TEST(StateInMemory, GoesIntoShardsAndZeroAndBack) {
  const Reference expected = reference();
  run_ranks(2, [&](const Group& group) {
    const NetPtr shards = make_net();
    sharded::shard_all(*shards);
    torch::optim::AdamW optimizer(shards->parameters(), torch::optim::AdamWOptions(0.5));
    step_of(*shards, optimizer, 70);
    int64_t step = 0;
    checkpoint::set_state({{"model", state_of(*shards)}, {"optim", state_of(optimizer)}, {"step", &step}},
                          expected.state);
    EXPECT_EQ(step, 2);
    // From rank 0, into a state that is spread over the ranks.
    const NetPtr plain = make_net();
    DistributedDataParallel<NetPtr> ddp(plain, {.process_group = group});
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(plain->parameters(), torch::optim::AdamWOptions(0.5),
                                                      {.process_group = group});
    const StateDict first = checkpoint::get_state({{"model", state_of(*shards)}, {"optim", state_of(optimizer)}},
                                                  {.first_rank_only = true});
    EXPECT_EQ(first.size(), group->getRank() == 0 ? 2u : 0u);
    checkpoint::set_state({{"model", state_of(ddp)}, {"optim", state_of(zero)}}, first, {.from_first_rank = true});
    // And out of it again.
    const StateDict spread = checkpoint::get_state({{"model", state_of(ddp)}, {"optim", state_of(zero)}});
    EXPECT_EQ(spread.at("optim").tensors.size(), 16u);
    const NetPtr last = make_net();
    torch::optim::AdamW stock(last->parameters(), torch::optim::AdamWOptions(0.5));
    checkpoint::set_state({{"model", state_of(*last)}, {"optim", state_of(stock)}}, spread);
    for (int64_t salt = 2; salt < 4; ++salt) {
      step_of(*shards, optimizer, salt);
      step_of(*last, stock, salt);
    }
    expect_values(*shards, expected.later, "shards");
    expect_values(*last, expected.later, "plain");
  });
}

TEST(StateInMemory, ShardedItIsWhatTheRankHolds) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = make_net();
    sharded::shard_all(*net);
    const StateDict state = checkpoint::get_state({{"model", state_of(*net)}}, {.full = false});
    const at::Tensor weight = state.at("model").tensors.at("first.weight");
    ASSERT_TRUE(is_dtensor(weight));
    const std::vector<at::Tensor> before = values_of(*net);
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& p : net->parameters()) p.zero_();
    }
    checkpoint::set_state({{"model", state_of(*net)}}, state);
    expect_values(*net, before, "after set_state");
  });
}

TEST(StateInMemory, WhatDoesNotFitIsRefused) {
  torch::nn::Linear small(2, 2), large(3, 2);
  StateDict state = checkpoint::get_state({{"model", state_of(*small)}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"model", state_of(*large)}}, state);
            }),
            "[checkpoint::set_state] \"model.weight\" has sizes [2,2] in the checkpoint, and [2,3] here\n  fix: load "
            "into a model of the "
            "same sizes, or give it another name, so that {.strict = false} passes over it");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"net", state_of(*small)}}, state);
            }),
            "[checkpoint::set_state] the state has no \"net\"\n  fix: set what is there");
  state["model"].tensors.erase("bias");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"model", state_of(*small)}}, state);
            }),
            "[checkpoint::set_state] \"model\" has other names in the checkpoint: missing there: bias\n"
            "  fix: load into the "
            "same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
}

}  // namespace
}  // namespace serried::testing
