// Each guard makes a function be recorded again when its condition changes, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <regex>

#include "serried/base/log.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tensor/dtensor.h"

namespace serried {
namespace {

using ::testing::HasSubstr;

/// Calls `step` until it replays.
template <class Step, class... Args>
void settle_on(Step& step, const Args&... args) {
  const int64_t replays = step.replays();
  for (int i = 0; i < 5 && step.replays() == replays; ++i) step(args...);
  EXPECT_GT(step.replays(), replays);
}

TEST(CaptureGuards, AnotherShapeIsRecordedOnceAndBothReplay) {
  auto step = capture([](const at::Tensor& x) { return x * 2; });
  for (const int64_t rows : {2, 4}) {
    for (int i = 0; i < 4; ++i) step(torch::ones({rows, 3}));
  }
  EXPECT_EQ(step.captures(), 2);
  EXPECT_EQ(step.last_recapture_reason(), "shape of input 0 was [2, 3] and is [4, 3]");
  const int64_t replays = step.replays();
  EXPECT_TRUE(at::equal(step(torch::ones({2, 3})), torch::full({2, 3}, 2.f)));
  EXPECT_TRUE(at::equal(step(torch::ones({4, 3})), torch::full({4, 3}, 2.f)));
  EXPECT_EQ(step.replays(), replays + 2);
}

TEST(CaptureGuards, DtypeStridesAndGradientsOfInputsCount) {
  auto step = capture([](const at::Tensor& x) { return (x * 2).detach(); });
  settle_on(step, torch::ones({3, 3}));
  settle_on(step, torch::ones({3, 3}, at::kDouble));
  EXPECT_EQ(step.last_recapture_reason(), "dtype of input 0 was Float and is Double");
  auto other = capture([](const at::Tensor& x) { return (x * 2).detach(); });
  settle_on(other, torch::ones({3, 2}));
  settle_on(other, torch::ones({2, 3}).t());
  EXPECT_EQ(other.last_recapture_reason(), "strides of input 0 was [2, 1] and is [1, 3]");
}

TEST(CaptureGuards, ValuesThatAreNoTensorsCount) {
  auto step = capture([](const at::Tensor& x, double scale, bool twice) { return x * scale * (twice ? 2 : 1); });
  settle_on(step, torch::ones({2}), 0.5, true);
  EXPECT_TRUE(at::equal(step(torch::ones({2}), 0.25, true), torch::full({2}, 0.5f)));
  EXPECT_EQ(step.last_recapture_reason(), "argument value 0 was 0.5 and is 0.25");
}

TEST(CaptureGuards, GradModeCounts) {
  const at::Tensor weight = torch::ones({2}, at::requires_grad());
  auto step = capture([&](const at::Tensor& x) {
    at::Tensor loss = (x * weight).sum();
    if (loss.requires_grad()) loss.backward();
    return loss.detach();
  });
  settle_on(step, torch::ones({2}));
  {
    torch::NoGradGuard no_grad;
    settle_on(step, torch::ones({2}));
  }
  EXPECT_EQ(step.last_recapture_reason(), "grad mode was on and is off");
}

TEST(CaptureGuards, TrainAndEvalOfAListedModuleCount) {
  torch::nn::Dropout dropout(0.5);
  auto step = capture([&](const at::Tensor& x) { return dropout(x); }, {.modules = {dropout.ptr()}});
  settle_on(step, torch::ones({100}));
  dropout->eval();
  EXPECT_TRUE(at::equal(step(torch::ones({100})), torch::ones({100})));
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("was train in 1 of 1 modules and is train in 0 of 1 modules"));
  settle_on(step, torch::ones({100}));
}

TEST(CaptureGuards, AParameterWithOtherMemoryIsNoticed) {
  torch::nn::Linear net(3, 2);
  const torch::NoGradGuard no_grad;
  auto step = capture([&](const at::Tensor& x) { return net(x); });
  settle_on(step, torch::ones({4, 3}));
  net->to(at::kDouble);
  net->to(at::kFloat);
  net->weight.zero_();
  net->bias.fill_(7);
  EXPECT_TRUE(at::equal(step(torch::ones({4, 3})), torch::full({4, 2}, 7.f)));
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("has other memory than when recorded"));
}

TEST(CaptureGuards, AParameterThatIsGoneIsNoticed) {
  auto net = std::make_unique<torch::nn::Linear>(3, 2);
  const torch::NoGradGuard no_grad;
  auto step = capture([&](const at::Tensor& x) { return (*net)(x); });
  settle_on(step, torch::ones({4, 3}));
  net = std::make_unique<torch::nn::Linear>(3, 2);
  EXPECT_TRUE(at::equal(step(torch::ones({4, 3})), (*net)(torch::ones({4, 3}))));
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("is gone"));
}

TEST(CaptureGuards, AGraphOfWhatIsGoneKeepsNoMemory) {
  at::Tensor weight = torch::ones({3});
  auto step = capture([&](const at::Tensor& x) { return x * weight; });
  settle_on(step, torch::ones({3}));
  const auto memory = weight.storage().getWeakStorageImpl();
  weight = torch::full({3}, 2.f);
  EXPECT_TRUE(at::equal(step(torch::ones({3})), weight));
  EXPECT_TRUE(memory.expired());
}

TEST(CaptureGuards, InputsThatAreOneTensorCount) {
  auto step = capture([](const at::Tensor& a, const at::Tensor& b) { return a + b; });
  const at::Tensor x = torch::ones({2}), y = torch::full({2}, 5.f);
  settle_on(step, x, x);
  EXPECT_TRUE(at::equal(step(x, y), torch::full({2}, 6.f)));
}

TEST(CaptureGuards, InputsThatShareMemoryCount) {
  // Order matters where one is a view of the other.
  const auto eager = [](at::Tensor a, at::Tensor b) {
    a.mul_(2);
    b.add_(1);
    return a + b;
  };
  auto step = capture(eager);
  settle_on(step, torch::ones({2}), torch::ones({2}));
  for (int i = 0; i < 4; ++i) {
    const at::Tensor whole = torch::full({3}, 1.f + i), same = whole.clone();
    const at::Tensor actual = step(whole.slice(0, 0, 2), whole.slice(0, 1, 3));
    EXPECT_TRUE(at::equal(actual, eager(same.slice(0, 0, 2), same.slice(0, 1, 3)))) << "call " << i;
    EXPECT_TRUE(at::equal(whole, same)) << "call " << i;
  }
  EXPECT_EQ(step.last_recapture_reason(), "memory of input 1 was its own and is input 0");
}

TEST(CaptureGuards, AHookOnAnInputIsNoticed) {
  auto step = capture([](const at::Tensor& x) { (x * x).sum().backward(); });
  const auto leaf = [] { return torch::ones({2}, at::requires_grad()); };
  settle_on(step, leaf());
  at::Tensor hooked = leaf();
  hooked.register_hook([](const at::Tensor& grad) { return grad * 10; });
  EXPECT_THROW(step(hooked), graph::CaptureError);
  EXPECT_TRUE(at::equal(hooked.grad(), torch::full({2}, 20.f)));
}

TEST(CaptureGuards, OptionsOfTorchsOwnModulesCount) {
  torch::nn::BatchNorm1d batch_norm(3);
  torch::nn::InstanceNorm1d instance_norm(3);
  torch::nn::LayerNorm layer_norm(torch::nn::LayerNormOptions({5}));
  torch::nn::GroupNorm group_norm(3, 3);
  torch::nn::Dropout dropout(0.0);
  torch::nn::Sequential net(batch_norm, instance_norm, layer_norm, group_norm, dropout);
  const auto eager = [&](const at::Tensor& x) {
    const torch::NoGradGuard off;
    return net->forward(x);
  };
  auto step = capture(eager, {.modules = {net.ptr()}});
  const at::Tensor x = torch::arange(60).to(at::kFloat).sin().view({4, 3, 5});
  const std::vector<std::function<void()>> changes = {[&] { batch_norm->options.eps(0.5); },
                                                      [&] { batch_norm->options.momentum(0.5); },
                                                      [&] { instance_norm->options.eps(0.25); },
                                                      [&] { layer_norm->options.eps(0.5); },
                                                      [&] { group_norm->options.eps(0.125); },
                                                      [&] { dropout->options.p(1); },
                                                      [&] { batch_norm->options.momentum(std::nullopt); }};
  for (const auto& change : changes) {
    settle_on(step, x);
    change();
    const at::Tensor before = batch_norm->running_mean.clone(), y = step(x), mean = batch_norm->running_mean.clone();
    EXPECT_THAT(step.last_recapture_reason(), HasSubstr("options of modules in the module torch::nn::Sequential"));
    batch_norm->running_mean.copy_(before);
    batch_norm->num_batches_tracked.sub_(1);
    EXPECT_TRUE(at::equal(y, eager(x)));
    EXPECT_TRUE(at::equal(mean, batch_norm->running_mean));
  }
}

TEST(CaptureGuards, TrainAndEvalInTurnAreTwoGraphs) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  const auto eager = [&](const at::Tensor& x) {
    const torch::NoGradGuard off;
    return net->forward(x);
  };
  auto step = capture(eager, {.modules = {net.ptr()}});
  for (int i = 0; i < 12; ++i) {
    const at::Tensor x = torch::randn({4, 3});
    net->eval();
    EXPECT_TRUE(at::equal(step(x), eager(x))) << "call " << i;
    net->train();
    step(x);
  }
  EXPECT_EQ(step.captures(), 2);
  EXPECT_GE(step.replays(), 18);
}

TEST(CaptureGuards, AModuleThatTheFunctionItselfSwitchesIsNoChange) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Dropout(0.5));
  auto step = capture(
      [&](const at::Tensor& x) {
        const torch::NoGradGuard off;
        net->train();
        at::Tensor y = net->forward(x);
        net->eval();
        return y;
      },
      {.modules = {net.ptr()}});
  settle_on(step, torch::ones({2, 3}));
  for (int i = 0; i < 4; ++i) step(torch::ones({2, 3}));
  EXPECT_EQ(step.captures(), 1);
}

TEST(CaptureGuards, ShapesInTurnWithRoomForOneEndInEagerCalls) {
  auto step = capture([](const at::Tensor& x) { return x * 2; }, {.max_graphs = 1, .max_recaptures = 3});
  for (int i = 0; i < 40; ++i) {
    const int size = 1 + i % 2;
    EXPECT_TRUE(at::equal(step(torch::ones({size})), torch::full({size}, 2.f)));
  }
  EXPECT_EQ(step.captures(), 4);
}

TEST(CaptureGuards, PlacementAndMeshOfADTensorCount) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    auto step = capture([](const at::Tensor& x) { return x * 2; });
    const at::Tensor whole = torch::ones({4, 2});
    settle_on(step, distribute_tensor(whole, mesh, {Shard(0)}));
    settle_on(step, distribute_tensor(whole, mesh, {Shard(1)}));
    EXPECT_THAT(step.last_recapture_reason(), HasSubstr("placement of input 0 was"));
    const DeviceMesh again = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    settle_on(step, distribute_tensor(whole, again, {Shard(1)}));
    EXPECT_EQ(step.captures(), 3);
  });
}

TEST(CaptureGuards, AnotherShapeOrDtypeOfADTensorIsCalledThat) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    auto step = capture([](const at::Tensor& x) { return x * 2; });
    settle_on(step, distribute_tensor(torch::ones({4, 2}), mesh, {Shard(0)}));
    settle_on(step, distribute_tensor(torch::ones({5, 2}), mesh, {Shard(0)}));
    EXPECT_EQ(step.last_recapture_reason(), "shape of input 0 was [4, 2] and is [5, 2]");
    settle_on(step, distribute_tensor(torch::ones({5, 2}, at::kDouble), mesh, {Shard(0)}));
    EXPECT_EQ(step.last_recapture_reason(), "dtype of input 0 was Float and is Double");
    settle_on(step, distribute_tensor(torch::ones({5, 2}, at::kDouble), mesh, {Replicate()}));
    EXPECT_EQ(step.last_recapture_reason(),
              "placement of input 0 was f64[5,2] S0 on mesh tp=2 and is f64[5,2] R on mesh tp=2");
  });
}

TEST(CaptureLog, SaysWhatBecomesOfEachCall) {
  log::set_topics("graph");
  ::testing::internal::CaptureStderr();
  auto step = capture([](const at::Tensor& x) { return x * 2; });
  for (const int64_t rows : {2, 4}) {
    for (int i = 0; i < 5; ++i) step(torch::ones({rows, 3}));
  }
  log::set_topics("none");
  const std::string text = ::testing::internal::GetCapturedStderr();
  const std::string one_line = std::regex_replace(text, std::regex("function [0-9]+|\\[serried[^\\]]*\\] "), "");
  EXPECT_THAT(one_line, ::testing::StartsWith("call 1 of  ran as it is\n"
                                              "call 2 of  was recorded: 1 ops, 0 of them collectives\n"
                                              "call 3 of  was recorded: 1 ops, 0 of them collectives\n"
                                              "call 3 of  gave a graph of 1 ops, which gives 0 B to collectives and "
                                              "holds while these do:\n"));
  EXPECT_THAT(one_line, HasSubstr("\n  input 0: f32[2, 3]\n"));
  EXPECT_THAT(one_line, HasSubstr("\ncall 4 of  replays its graph of 1 ops, as later ones do\n"
                                  "call 6 of  is recorded anew: shape of input 0 was [2, 3] and is [4, 3]\n"
                                  "call 6 of  was recorded: 1 ops, 0 of them collectives\n"));
  EXPECT_THAT(one_line, HasSubstr("\ncall 8 of  replays its graph of 1 ops, as later ones do\n"));
}

TEST(CaptureGuards, AreListedWithWhatTheyExpect) {
  auto step = capture([](const at::Tensor& x) { return x * 2; });
  settle_on(step, torch::ones({2, 3}));
  std::string text;
  for (const graph::Guard& guard : step.guards()) text += guard.name + " = " + guard.expected + "\n";
  EXPECT_THAT(text, HasSubstr("input 0 = "));
  EXPECT_THAT(text, HasSubstr("grad mode = on"));
  EXPECT_THAT(text, HasSubstr("current process group = none"));
}

TEST(CaptureGuards, ALimitEndsEndlessRecaptures) {
  auto step = capture([](const at::Tensor& x) { return x * 2; }, {.max_graphs = 2, .max_recaptures = 2});
  for (int size = 1; size < 8; ++size) {
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(step(torch::ones({size})), torch::full({size}, 2.f)));
  }
  EXPECT_EQ(step.captures(), 3);
}

TEST(CaptureGuards, TheGraphUnusedForLongestGoesFirst) {
  auto step = capture([](const at::Tensor& x) { return x * 2; }, {.max_graphs = 2});
  for (int size : {1, 2, 3}) settle_on(step, torch::ones({size}));
  EXPECT_EQ(step.captures(), 3);
  settle_on(step, torch::ones({3}));
  settle_on(step, torch::ones({2}));
  EXPECT_EQ(step.captures(), 3);
  settle_on(step, torch::ones({1}));
  EXPECT_EQ(step.captures(), 4);
}

TEST(CaptureGuards, AsManyKindsOfCallsAsThereMayBeGraphsTakeTurns) {
  auto step = capture([](const at::Tensor& x) { return x * 2; }, {.max_graphs = 12});
  for (int64_t i = 0; i < 60; ++i)
    EXPECT_TRUE(at::equal(step(torch::ones({i % 12 + 1})), torch::full({i % 12 + 1}, 2.f)));
  EXPECT_EQ(step.captures(), 12);
  EXPECT_EQ(step.replays(), 60 - 1 - 24);
}

}  // namespace
}  // namespace serried
