// The handle: gathers that are started by hand, collectives of users, and several modules as one block.
#include <gtest/gtest.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/graph/capture.h"
#include "serried/tensor/debug/comm_debug.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

struct Tower final : torch::nn::Module {
  torch::nn::Linear low{nullptr}, middle{nullptr}, high{nullptr};

  Tower() {
    low = register_module("low", torch::nn::Linear(3, 5));
    middle = register_module("middle", torch::nn::Linear(5, 7));
    high = register_module("high", torch::nn::Linear(7, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return high(torch::tanh(middle(torch::tanh(low(x))))); }
};

std::shared_ptr<Tower> tower() {
  return seeded(5, [] { return std::make_shared<Tower>(); });
}

at::Tensor tower_input(const Group& group) {
  return models::values({4, 3}, group->getRank()).to(at::kFloat);
}

void expect_same_gradients(const Tower& actual, const Tower& expected) {
  const auto ours = actual.parameters(), theirs = expected.parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    expect_equal(DTensor(ours[i].grad()).full_tensor(), DTensor(theirs[i].grad()).full_tensor(),
                 c10::str("parameter ", i));
  }
}

TEST(FullyShardHandle, UnshardMayBeStartedAndWaitedForOrNot) {
  run_ranks(3, [](const Group& group) {
    const auto net = tower(), plain = tower();
    const FullyShardHandle handle = fully_shard(*net);
    const at::Tensor x = tower_input(group);
    const UnshardHandle gathering = handle.unshard({.async = true});
    EXPECT_GT(handle.usage().gathered_bytes, 0);
    gathering.wait();
    gathering.wait();
    CommDebugMode comm;
    expect_equal(net->forward(x), plain->forward(x));
    EXPECT_EQ(comm.count(), 0);
    handle.reshard();
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    handle.unshard({.async = true});
    expect_equal(net->forward(x), plain->forward(x));
    EXPECT_EQ(comm.count("all_gather"), 1);
    handle.unshard({.async = true});
    handle.reshard();
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    expect_equal(net->forward(x), plain->forward(x));
  });
}

TEST(FullyShardHandle, CollectivesOfUsersTakeThePlaceOfOurs) {
  run_ranks(3, [](const Group& group) {
    const auto net = tower(), other = tower();
    const FullyShardHandle handle = fully_shard(*net);
    fully_shard(*other);
    const at::Tensor x = tower_input(group);
    int num_gathers = 0, num_reductions = 0;
    handle.set_custom_all_gather([&](const at::Tensor& all, const at::Tensor& mine, const Group& g) {
      ++num_gathers;
      EXPECT_EQ(all.numel(), g->getSize() * mine.numel());
      all_gather_into(all, mine, g);
    });
    handle.set_custom_reduce_scatter(
        [&](const at::Tensor& mine, const at::Tensor& all, const Group& g, const c10d::ReduceOp& op) {
          ++num_reductions;
          EXPECT_EQ(op.op_, c10d::ReduceOp::AVG);
          mine.copy_(all_reduce(all, g, {.op = op}).chunk(g->getSize())[size_t(g->getRank())]);
        });
    net->forward(x).sum().backward();
    other->forward(x).sum().backward();
    EXPECT_EQ(num_gathers, 1);
    EXPECT_EQ(num_reductions, 1);
    expect_same_gradients(*net, *other);
    handle.set_custom_all_gather({});
    handle.set_custom_reduce_scatter({});
    net->forward(x).sum().backward();
    EXPECT_EQ(num_gathers + num_reductions, 2);
  });
}

TEST(FullyShardHandle, AHookBehindTheReductionMayChangeGradients) {
  for (const bool overlap : {false, true}) {
    run_ranks(4, [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
      const auto net = tower(), other = tower();
      const FullyShardHandle handle = fully_shard(*net, {.mesh = mesh, .overlap = overlap});
      fully_shard(*other, {.mesh = mesh});
      handle.set_all_reduce_hook([&](const at::Tensor& reduced, const Group& g) {
        EXPECT_EQ(g->getSize(), 2);
        reduced.mul_(2);
      });
      const at::Tensor x = tower_input(group);
      net->forward(x).sum().backward();
      (other->forward(x).sum() * 2).backward();
      expect_same_gradients(*net, *other);
    });
  }
}

TEST(FullyShardHandle, AHookThatFailsIsRaisedAndLeavesNothingBehind) {
  run_ranks(2, [](const Group& group) {
    const auto net = tower();
    const FullyShardHandle handle = fully_shard(*net);
    const at::Tensor x = tower_input(group);
    handle.set_custom_all_gather(
        [](const at::Tensor&, const at::Tensor&, const Group&) { throw std::runtime_error("no gather"); });
    EXPECT_THROW(net->forward(x), std::runtime_error);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    handle.set_custom_all_gather({});
    handle.set_custom_reduce_scatter([](const at::Tensor&, const at::Tensor&, const Group&, const c10d::ReduceOp&) {
      throw std::runtime_error("no reduction");
    });
    EXPECT_THROW(net->forward(x).sum().backward(), std::runtime_error);
    handle.set_custom_reduce_scatter({});
    handle.set_all_reduce_hook([](const at::Tensor&, const Group&) { throw std::runtime_error("no change"); });
    EXPECT_THROW(net->forward(x).sum().backward(), std::runtime_error);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    EXPECT_EQ(handle.usage().gradient_bytes, 0);
    EXPECT_FALSE(net->low->weight.grad().defined());
  });
}

TEST(FullyShardHandle, AGraphIsRecordedAnewWhenAHookChanges) {
  run_ranks(2, [](const Group& group) {
    const auto net = tower();
    const FullyShardHandle handle = fully_shard(*net);
    const at::Tensor x = tower_input(group);
    auto gradient = capture([&](const at::Tensor& input) {
      for (const at::Tensor& p : net->parameters()) p.mutable_grad().reset();
      net->forward(input).sum().backward();
      return DTensor(net->low->bias.grad()).full_tensor();
    });
    const at::Tensor once = gradient(x).clone();
    for (int i = 0; i < 4; ++i) expect_equal(gradient(x), once);
    handle.set_all_reduce_hook([](const at::Tensor& reduced, const Group&) { reduced.mul_(4); });
    for (int i = 0; i < 4; ++i) expect_equal(gradient(x), once * 4);
  });
}

TEST(FullyShardHandle, SumsAreDividedByHandWhereThatIsAskedFor) {
  run_ranks(2, [](const Group& group) {
    const auto net = tower(), other = tower();
    const FullyShardHandle handle = fully_shard(*net);
    fully_shard(*other);
    handle.set_force_sum_reduction_for_comms(true);
    const at::Tensor x = tower_input(group);
    net->forward(x).sum().backward();
    other->forward(x).sum().backward();
    expect_same_gradients(*net, *other);
    handle.set_requires_gradient_sync(false);
    CommDebugMode comm;
    net->forward(x).sum().backward();
    EXPECT_EQ(comm.count("reduce_scatter"), 0);
    handle.set_requires_gradient_sync(true);
    net->forward(x).sum().backward();
    EXPECT_EQ(comm.count("reduce_scatter"), 1);
  });
}

TEST(FullyShardHandle, SeveralModulesAreOneBlock) {
  run_ranks(2, [](const Group& group) {
    const auto net = tower(), other = tower();
    const FullyShardHandle low = fully_shard({net->low.get(), net->high.get()}, {.reshard_after_forward = false});
    fully_shard(*net);
    fully_shard(*other);
    const at::Tensor x = tower_input(group);
    CommDebugMode comm;
    net->forward(x).sum().backward();
    EXPECT_EQ(comm.count("all_gather"), 2);
    EXPECT_EQ(comm.count("reduce_scatter"), 2);
    other->forward(x).sum().backward();
    expect_same_gradients(*net, *other);
    EXPECT_GT(low.whole_bytes(), int64_t((3 * 5 + 5 + 7 * 2 + 2) * sizeof(float)));
  });
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find("\n  at:"));
}

TEST(FullyShardHandle, ListsOfModulesAreChecked) {
  run_ranks(2, [](const Group&) {
    const auto net = tower();
    const std::string fix = "\n  fix: name each module of the block once";
    EXPECT_EQ(first_line(error_text<c10::ValueError>([&] { fully_shard(std::vector<torch::nn::Module*>{}); })),
              "[fully_shard] the list of 0 modules is empty, or names null or one twice" + fix);
    EXPECT_EQ(first_line(error_text<c10::ValueError>([&] {
                fully_shard({net->low.get(), net->low.get()});
              })),
              "[fully_shard] the list of 2 modules is empty, or names null or one twice" + fix);
    fully_shard({net->low.get(), net->high.get()});
    EXPECT_EQ(first_line(error_text<c10::ValueError>([&] { fully_shard(*net->high); })),
              "[fully_shard] the module torch::nn::LinearImpl is fully sharded already\n"
              "  fix: call it once per module, layers before the module around them");
    fully_shard(*net->middle);
    const FullyShardHandle around = fully_shard(*net);
    EXPECT_EQ(first_line(error_text<c10::ValueError>([&] { around.set_all_reduce_hook({}); })),
              "[set_all_reduce_hook] the module has no parameters of its own: all of them belong to blocks inside\n"
              "  fix: call it on the handles of those blocks");
  });
}

}  // namespace
}  // namespace serried::testing
