// Blocks never compute with values, gradients or flags of another time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using namespace testing::sharded;

at::Tensor whole_gradient(const at::Tensor& parameter) {
  return parameter.grad().defined() ? DTensor(parameter.grad()).full_tensor() : at::Tensor();
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// torch::optim::SGD writes through data(), which no version counts.
TEST(FullyShardStale, AnEvaluationBetweenCapturedStepsSeesWhatTheyWrote) {
  run_ranks(2, [](const Group& group) {
    const NetPtr plain = make([] { return std::make_shared<Mlp>(); }, at::kDouble),
                 net = make([] { return std::make_shared<Mlp>(); }, at::kDouble);
    const FullyShardHandle handle = shard_all(*net);
    torch::optim::SGD optimizer(net->parameters(), 0.05), plain_optimizer(plain->parameters(), 0.05);
    auto step = capture([&](const at::Tensor& x) {
      optimizer.zero_grad();
      static_cast<Mlp&>(*net).forward(x).square().mean().backward();
      optimizer.step();
    });
    const at::Tensor x = plain->input({6, 5}, 3);
    for (int i = 0; i < 6; ++i) {
      step(x);
      plain_optimizer.zero_grad();
      static_cast<Mlp&>(*plain).forward(x).square().mean().backward();
      plain_optimizer.step();
      const at::NoGradGuard no_grad;
      EXPECT_LE(difference(net->loss(5), plain->loss(5)), 1e-9) << "call " << i << " on rank " << group->getRank();
    }
    EXPECT_GT(step.replays(), 0);
  });
}

// Parameters of a block lie in one piece of memory: what is written under another name is still the parameter.
TEST(FullyShardStale, GradientsOfParametersThatTheFunctionWritesAreThoseOfTheReplay) {
  for (const bool by_data : {true, false}) {
    run_ranks(2, [&](const Group&) {
      const auto make_layer = [] {
        torch::nn::Linear layer = seeded(4, [] { return torch::nn::Linear(4, 4); });
        layer->to(at::kDouble);
        return layer;
      };
      torch::nn::Linear plain = make_layer(), net = make_layer();
      fully_shard(*net);
      const auto step = [&](torch::nn::Linear layer) {
        for (const at::Tensor& p : layer->parameters()) (by_data ? p.data() : p.detach()).clamp_(-0.3, 0.3);
        const at::Tensor loss = layer(at::ones({2, 4}, at::kDouble)).square().mean();
        loss.backward();
        return loss.detach();
      };
      torch::optim::SGD optimizer(net->parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
      auto captured = capture([&] { return step(net); });
      for (int i = 0; i < 6; ++i) {
        optimizer.zero_grad();
        plain_optimizer.zero_grad();
        EXPECT_LE(difference(captured(), step(plain)), 1e-12) << "call " << i;
        EXPECT_LE(difference(whole_gradient(net->bias), plain->bias.grad()), 1e-12) << "call " << i;
        EXPECT_LE(difference(whole_gradient(net->weight), plain->weight.grad()), 1e-12) << "call " << i;
        // As after an eager step, plain tensors of its size go with it.
        EXPECT_LE(difference(net->weight.grad() + at::ones({4, 4}), plain->weight.grad() + 1), 1e-12);
        optimizer.step();
        plain_optimizer.step();
      }
      EXPECT_GT(captured.replays(), 0);
    });
  }
}

TEST(FullyShardStale, OptionsOfModulesMayChangeBetweenCapturedSteps) {
  run_ranks(2, [](const Group&) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    fully_shard(*net);
    auto step = capture([&](const at::Tensor& x) { net->forward(x).square().mean().backward(); });
    const at::Tensor x = at::arange(24).view({6, 4}).sin();
    for (int i = 0; i < 6; ++i) step(x);
    EXPECT_GT(step.replays(), 0);
    auto& batch_norm = *net[1]->as<torch::nn::BatchNorm1d>();
    batch_norm.options.momentum(0);
    const at::Tensor mean = batch_norm.running_mean.clone();
    step(x);
    EXPECT_EQ(difference(batch_norm.running_mean, mean), 0);
  });
}

// Gradients lie in new memory after every backward; whether that of a freed one is used again is chance.
TEST(FullyShardStale, AStepThatShapesTakeInTurnsIsReplayedForEach) {
  run_ranks(2, [](const Group&) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fully_shard(*net);
    auto step = capture([&](const at::Tensor& x) {
      for (const at::Tensor& p : net->parameters()) p.mutable_grad().reset();
      const at::Tensor loss = net->forward(x).square().mean();
      loss.backward();
      return loss.detach();
    });
    std::vector<at::Tensor> held;  // so that memory is not used again
    for (int i = 0; i < 30; ++i) {
      step(at::ones({3 + i % 3, 4}));
      held.push_back(at::empty({330}));
    }
    EXPECT_EQ(step.captures(), 3);
    EXPECT_GT(step.replays(), 15);
  });
}

TEST(FullyShardStale, ZeroGradOfAModuleInACapturedStepIsNamed) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear net(4, 4);
    fully_shard(*net);
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad();
      net->forward(x).square().mean().backward();
    });
    const std::string text = testing::error_text<c10::Error>([&] {
      for (int i = 0; i < 6; ++i) step(at::ones({3, 4}) * i);
    });
    EXPECT_THAT(text, ::testing::HasSubstr("fix: clear gradients by optimizer.zero_grad(): that of a module looks at "
                                           "them before it does"));
  });
}

TEST(FullyShardStale, ACapturedFunctionSeesThatAModuleEvaluates) {
  run_ranks(2, [](const Group&) {
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Dropout(0.5), torch::nn::Linear(6, 2));
    fully_shard(*net);
    const at::NoGradGuard no_grad;
    auto forward = capture([&](const at::Tensor& x) { return net->forward(x); });
    const at::Tensor x = at::ones({3, 4});
    for (int i = 0; i < 4; ++i) forward(x);
    const int64_t trained = forward.replays();
    EXPECT_GT(trained, 0);
    net->eval();
    const at::Tensor expected = net->forward(x);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(difference(forward(x), expected), 0);
    EXPECT_GT(forward.replays(), trained);
  });
}

TEST(FullyShardStale, ACapturedStepRefusesParametersThatSomeRanksUse) {
  run_ranks(2, [](const Group& group) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); }, at::kDouble);
    fully_shard(*net);
    auto& mlp = static_cast<Mlp&>(*net);
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad(false);
      at::Tensor y = mlp.first(x);
      if (group->getRank() == 0) y = torch::tanh(mlp.second(y));
      y.square().mean().backward();
    });
    const at::Tensor x = net->input({6, 5}, 3);
    const std::string text = testing::error_text<c10::NotImplementedError>([&] {
      for (int i = 0; i < 3; ++i) step(x);
    });
    for (const char* part : {"second.weight of block 0", " got a gradient on some ranks only, this rank ",
                             group->getRank() == 0 ? "rank among them" : "rank not among them",
                             "use the same parameters on every rank, or run this step eagerly"}) {
      EXPECT_THAT(text, ::testing::HasSubstr(part));
    }
  });
}

TEST(FullyShardStale, PartsKeptFromReplicasAreReducedWhereTheLastBackwardDoesNotReach) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
    const NetPtr plain = make([] { return std::make_shared<Mlp>(); }, at::kDouble),
                 net = make([] { return std::make_shared<Mlp>(); }, at::kDouble);
    for (const auto& layer : net->layers()) fully_shard(*layer, {.mesh = mesh});
    const FullyShardHandle handle = fully_shard(*net, {.mesh = mesh});
    handle.set_requires_all_reduce(false);
    net->loss(group->getRank()).backward();
    handle.set_requires_all_reduce(true);
    auto& mlp = static_cast<Mlp&>(*net);
    mlp.first(net->input({6, 5}, 9 + group->getRank())).square().mean().backward();
    for (int r = 0; r < 4; ++r) {
      (plain->loss(r) / 4).backward();
      (static_cast<Mlp&>(*plain).first(plain->input({6, 5}, 9 + r)).square().mean() / 4).backward();
    }
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor actual = whole_gradient(net->parameters()[i]);
      ASSERT_TRUE(actual.defined()) << "parameter " << i;
      EXPECT_LE(difference(actual, plain->parameters()[i].grad()), 1e-9) << "parameter " << i;
    }
  });
}

TEST(FullyShardStale, ALargeFactorLeavesGradientsInHalf) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); });
    const FullyShardHandle handle =
        fully_shard(*net, {.mixed_precision = {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}});
    handle.set_gradient_divide_factor(1e8);
    (static_cast<Mlp&>(*net).forward(net->input({6, 5}, 1)) * 1e3).sum().backward();
    for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

}  // namespace
}  // namespace serried
