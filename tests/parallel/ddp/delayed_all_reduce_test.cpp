// Parameters that stay out of the buckets: one reduction for all of them, when the trigger's gradient is there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried::delayed_all_reduce_test {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::OnRanks;

/// The scales are used by every layer, so their gradients are complete only when those of the first layer are.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("second", second);
    scale = register_parameter("scale", at::full({4}, 0.5));
    shift = register_parameter("shift", at::full({4}, 0.1));
    unused = register_parameter("unused", at::ones({2, 3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::gelu(first(x) * scale + shift);
    if (throws_in_backward) {
      hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("backward fails"); });
    }
    return second(hidden) * scale + shift;
  }
  torch::nn::Linear first{5, 4}, second{4, 4};
  at::Tensor scale, shift, unused;
  bool throws_in_backward = false;
};
TORCH_MODULE(Net);

const std::vector<std::string> kDelayed = {"scale", "shift", "unused"};

Net seeded_net(int seed = 0) {
  return seeded(seed, [] { return Net(); });
}
at::Tensor whole_batch(int world_size, int step = 0) {
  return seeded(100 + step, [&] { return at::randn({3 * world_size, 5}); });
}
at::Tensor batch_of(const Group& group, int step = 0) {
  return whole_batch(group->getSize(), step).narrow(0, 3 * group->getRank(), 3);
}

void expect_same_gradients(const Net& actual, const Net& expected) {
  const auto wanted = expected->named_parameters();
  for (const auto& item : actual->named_parameters()) {
    const at::Tensor grad = wanted[item.key()].grad();
    expect_close(item.value().grad(), grad.defined() ? grad : at::zeros_like(item.value()), item.key());
  }
}

class DelayedAllReduce : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, DelayedAllReduce, ::testing::ValuesIn(testing::settings({1, 2, 3})),
                         testing::name_of);

TEST_P(DelayedAllReduce, AveragesWhatTheBucketsDoNotHold) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net(group->getRank());
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = kDelayed, .trigger = "first.bias"}});
    EXPECT_EQ(ddp.reducer().parameters().size(), 4);
    EXPECT_EQ(ddp.data_parallel_parameters().size(), 7);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      plain(whole_batch(world_size(), step)).square().mean().backward();
      const at::Tensor loss = ddp(batch_of(group, step)).square().mean();
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);  // only now: the forward has been made
      loss.backward();
      expect_same_gradients(net, plain);
      plain_optimizer.step();
      optimizer.step();
      plain_optimizer.zero_grad();
    }
  });
}

TEST_P(DelayedAllReduce, GradientsLieSideBySide) {
  on_ranks([&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = kDelayed, .trigger = "first.bias"}});
    ddp(batch_of(group)).sum().backward();
    EXPECT_TRUE(net->scale.grad().storage().is_alias_of(net->shift.grad().storage()));
    EXPECT_EQ(net->shift.grad().storage_offset(), 4);
    EXPECT_FALSE(net->scale.grad().storage().is_alias_of(net->second->bias.grad().storage()));
  });
}

TEST_P(DelayedAllReduce, NoSyncAddsUpAndTheNextBackwardSharesTheSum) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = kDelayed, .trigger = "first.bias"}});
    for (int step = 0; step < 4; ++step) plain(whole_batch(world_size(), step)).square().mean().backward();
    for (int step = 0; step < 4; step += 2) {
      {
        const auto guard = ddp.no_sync();
        ddp(batch_of(group, step)).square().mean().backward();
      }
      ddp(batch_of(group, step + 1)).square().mean().backward();
    }
    expect_same_gradients(net, plain);
  });
}

TEST_P(DelayedAllReduce, AllParametersMayBeDelayed) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    std::vector<std::string> all;
    for (const auto& item : net->named_parameters()) all.push_back(item.key());
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = all, .trigger = "first.weight"}});
    EXPECT_TRUE(ddp.reducer().buckets().empty());
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      ddp.zero_grad();
      plain(whole_batch(world_size(), step)).square().mean().backward();
      ddp(batch_of(group, step)).square().mean().backward();
      expect_same_gradients(net, plain);
    }
  });
}

TEST_P(DelayedAllReduce, GoesOnAfterAnExceptionAndInAnotherGroup) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = kDelayed, .trigger = "first.bias"}});
    net->throws_in_backward = true;
    EXPECT_THROW(ddp(batch_of(group)).sum().backward(), std::runtime_error);
    net->throws_in_backward = false;
    ddp.zero_grad();
    ddp(batch_of(group)).square().mean().backward();
    plain(whole_batch(world_size())).square().mean().backward();
    expect_same_gradients(net, plain);
    ddp.set_process_group(testing::sibling(group, GetParam().backend));
    expect_same_gradients(net, plain);
    ddp(batch_of(group)).square().mean().backward();
    plain(whole_batch(world_size())).square().mean().backward();
    expect_same_gradients(net, plain);
  });
}

TEST(DelayedAllReduceOptions, WorkWithMixedPrecision) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group,
                                      .delay_all_reduce = {.parameters = kDelayed, .trigger = "first.bias"},
                                      .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    Net plain = seeded_net();
    plain(whole_batch(2)).square().mean().backward();
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      ddp(batch_of(group)).to(at::kFloat).square().mean().backward();
      EXPECT_EQ(net->scale.scalar_type(), at::kFloat);
      EXPECT_EQ(net->scale.grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(net->scale.grad().allclose(plain->scale.grad(), 0.03, 0.01));
    }
  });
}

std::string error_with(const serried::DelayedAllReduce& delay) {
  std::string text;
  run_ranks(1, [&](const Group& group) {
    Net net = seeded_net();
    net->unused = net->register_parameter("doubled", at::ones({2}, at::kDouble));
    text = error_text<c10::ValueError>(
        [&] { DistributedDataParallel ddp(net, {.process_group = group, .delay_all_reduce = delay}); });
  });
  return text.substr(0, text.find("\n  at:"));
}

TEST(DelayedAllReduceOptions, AreCheckedAtConstruction) {
  const std::string fix_both = "\n  fix: name the parameters, and the one whose gradient comes after all of theirs";
  EXPECT_EQ(error_with({.parameters = {"scale"}}), "[delay_all_reduce] there are parameters but no trigger" + fix_both);
  EXPECT_EQ(error_with({.trigger = "scale"}), "[delay_all_reduce] there is a trigger but no parameter" + fix_both);
  const std::string fix_name =
      "\n  fix: use names that named_parameters() of the module gives, each once and none of .ignore";
  EXPECT_EQ(error_with({.parameters = {"scales"}, .trigger = "first.bias"}),
            "[delay_all_reduce] \"scales\" is not a parameter that requires a gradient" + fix_name);
  EXPECT_EQ(error_with({.parameters = {"scale"}, .trigger = "third"}),
            "[delay_all_reduce] \"third\" is not a parameter that requires a gradient" + fix_name);
  EXPECT_EQ(error_with({.parameters = {"scale", "doubled"}, .trigger = "first.bias"}),
            "[delay_all_reduce] scale is Float, but doubled is Double\n  fix: delay parameters of one dtype");
}

TEST(DelayedAllReduceOptions, ATriggerThatComesTooEarlyIsAnError) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = {"scale"}, .trigger = "second.bias"}});
    const std::string text = error_text<c10::ValueError>([&] { ddp(batch_of(group)).sum().backward(); });
    EXPECT_FALSE(net->scale.grad().defined()) << "half an average";
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[delay_all_reduce] the gradient of scale came after that of the trigger second.bias, too late to be "
              "averaged\n  fix: choose a trigger that forward uses before all delayed parameters");
  });
}

}  // namespace
}  // namespace serried::delayed_all_reduce_test
