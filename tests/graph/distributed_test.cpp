// Captured steps over several ranks train bit for bit as eager ones do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/sync_batchnorm.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::OnRanks;

constexpr int kSteps = 12;

struct PerceptronImpl : torch::nn::Module {
  explicit PerceptronImpl(double dropout = 0) : dropout_(dropout) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = torch::gelu(fc1(x));
    if (dropout_ > 0) hidden = torch::dropout(hidden, dropout_, is_training());
    return fc2(hidden);
  }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3};
  double dropout_;
};
TORCH_MODULE(Perceptron);

Perceptron seeded_perceptron(double dropout = 0) {
  return seeded(3, [&] { return Perceptron(dropout); });
}

at::Tensor batch(int step, int rank) {
  return seeded(100 + 10 * step + rank, [] { return at::randn({4, 5}); });
}

void expect_equal_parameters(torch::nn::Module& actual, torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  const auto part = [](const at::Tensor& t) { return dtensor_meta(t) != nullptr ? dtensor_meta(t)->local : t; };
  for (const auto& item : actual.named_parameters()) {
    EXPECT_TRUE(at::equal(part(item.value()), part(wanted[item.key()]))) << item.key();
    ASSERT_EQ(item.value().grad().defined(), wanted[item.key()].grad().defined()) << item.key();
    if (!item.value().grad().defined()) continue;
    EXPECT_TRUE(at::equal(part(item.value().grad()), part(wanted[item.key()].grad()))) << item.key();
  }
}

class CapturedDdp : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedDdp, ::testing::ValuesIn(testing::settings({1, 2, 3})), testing::name_of);

TEST_P(CapturedDdp, TrainsAsEagerDoes) {
  on_ranks([&](const Group& group) {
    for (const bool as_view : {true, false}) {
      std::vector<Perceptron> nets = {seeded_perceptron(), seeded_perceptron()};
      std::vector<std::vector<at::Tensor>> losses(2);
      for (int captured = 0; captured < 2; ++captured) {
        DistributedDataParallel ddp(nets[captured], {.process_group = group, .gradient_as_bucket_view = as_view});
        torch::optim::SGD optimizer(nets[captured]->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        const auto train = [&](const at::Tensor& x) {
          optimizer.zero_grad();
          at::Tensor loss = ddp(x).square().mean();
          loss.backward();
          optimizer.step();
          return loss;
        };
        auto step = capture(train);
        for (int i = 0; i < kSteps; ++i) {
          const at::Tensor x = batch(i, group->getRank());
          losses[captured].push_back(captured ? step(x) : train(x));
        }
        if (!captured) continue;
        EXPECT_GE(step.replays(), kSteps - 5) << step.last_recapture_reason();
        if (group->getSize() > 1) {
          EXPECT_EQ(step.graph().count("all_reduce"), 1) << step.graph().to_string();
        }
      }
      for (int i = 0; i < kSteps; ++i) EXPECT_TRUE(at::equal(losses[0][i], losses[1][i])) << "step " << i;
      expect_equal_parameters(*nets[1], *nets[0]);
    }
  });
}

TEST_P(CapturedDdp, TrainsWithBuffersAndEvaluationsInBetweenAsEagerDoes) {
  on_ranks([&](const Group& group) {
    std::vector<torch::nn::Sequential> nets;
    for (int captured = 0; captured < 2; ++captured) {
      nets.push_back(seeded(3, [] {
        return torch::nn::Sequential(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
      }));
      DistributedDataParallel ddp(nets.back(), {.process_group = group});
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
      const auto train = [&](const at::Tensor& x) {
        optimizer.zero_grad();
        ddp(x).square().mean().backward();
        optimizer.step();
      };
      const auto evaluate = [&](const at::Tensor& x) {
        const torch::NoGradGuard off;
        return ddp(x);
      };
      auto step = capture(train);
      auto evaluation = capture(evaluate);
      for (int i = 0; i < 3 * kSteps; ++i) {
        const at::Tensor x = batch(i, group->getRank());
        ddp.train();
        if (captured) {
          step(x);
        } else {
          train(x);
        }
        if (i % 3 != 0) continue;
        ddp.eval();
        if (captured) {
          evaluation(x);
        } else {
          evaluate(x);
        }
      }
      if (!captured) continue;
      EXPECT_GE(step.replays(), 2 * kSteps) << step.last_recapture_reason();
      EXPECT_GE(evaluation.replays(), kSteps - 5) << evaluation.last_recapture_reason();
    }
    expect_equal_parameters(*nets[1], *nets[0]);
    const auto buffers = nets[0]->named_buffers();
    for (const auto& item : nets[1]->named_buffers()) EXPECT_TRUE(at::equal(item.value(), buffers[item.key()]));
  });
}

TEST_P(CapturedDdp, SeesOptionsOfItsModulesChange) {
  on_ranks([&](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
    DistributedDataParallel ddp(net, {.process_group = group});
    auto step = capture([&](const at::Tensor& x) { ddp(x).square().mean().backward(); });
    const at::Tensor x = torch::arange(12).to(at::kFloat).view({4, 3});  // alike on all ranks: buffers are broadcast
    for (int i = 0; i < kSteps; ++i) step(x);
    EXPECT_GT(step.replays(), 0);
    auto& batch_norm = *net[1]->as<torch::nn::BatchNorm1d>();
    batch_norm.options.momentum(0);
    const at::Tensor mean = batch_norm.running_mean.clone();
    step(x);
    EXPECT_TRUE(at::equal(batch_norm.running_mean, mean)) << step.last_recapture_reason();
  });
}

TEST_P(CapturedDdp, AccumulatesOverCallsAsEagerDoes) {
  on_ranks([&](const Group& group) {
    std::vector<Perceptron> nets = {seeded_perceptron(), seeded_perceptron()};
    for (int captured = 0; captured < 2; ++captured) {
      DistributedDataParallel ddp(nets[captured], {.process_group = group});
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
      const auto train = [&](const at::Tensor& x, bool is_last) {
        if (!is_last) {
          const auto alone = ddp.no_sync();
          ddp(x).square().mean().backward();
          return;
        }
        ddp(x).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      auto step = capture(train);
      for (int i = 0; i < 2 * kSteps; ++i) {
        const at::Tensor x = batch(i, group->getRank());
        if (captured) {
          step(x, i % 2 == 1);
        } else {
          train(x, i % 2 == 1);
        }
      }
      if (captured) EXPECT_GE(step.replays(), kSteps) << step.last_recapture_reason();
    }
    expect_equal_parameters(*nets[1], *nets[0]);
  });
}

TEST(CapturedDTensors, ParametersWithEmptyPartsTrainAsEagerDoes) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"tp"}, {.group = group});
    std::vector<std::vector<at::Tensor>> losses(2);
    for (int captured = 0; captured < 2; ++captured) {
      const at::Tensor whole = seeded(9, [] { return at::randn({1, 2}); });
      at::Tensor weight = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_();
      AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1));
      const auto train = [&](const at::Tensor& x) {
        optimizer.zero_grad();
        at::Tensor loss = torch::linear(x, weight).square().mean();
        loss.backward();
        optimizer.step();
        return DTensor(loss).full_tensor();
      };
      auto step = capture(train);
      for (int i = 0; i < kSteps; ++i) {
        const at::Tensor x = seeded(20 + i, [] { return at::randn({4, 2}); });
        const at::Tensor on_mesh = distribute_tensor(x, mesh, {Replicate()});
        losses[captured].push_back((captured ? step(on_mesh) : train(on_mesh)).detach());
      }
      if (captured) EXPECT_GE(step.replays(), kSteps - 4) << step.last_recapture_reason();
    }
    for (int i = 0; i < kSteps; ++i) EXPECT_TRUE(at::equal(losses[0][i], losses[1][i])) << "step " << i;
  });
}

TEST(CapturedSyncBatchNorm, FollowsTheBatchOfAnotherRank) {
  run_ranks(2, [](const Group& group) {
    const auto run = [&](bool is_captured) {
      SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
      const auto eager = [&](const at::Tensor& x) {
        norm->zero_grad();
        at::Tensor y = norm(x).square();
        y.sum().backward();
        return y.detach();
      };
      auto step = capture(eager);
      std::vector<at::Tensor> ends;
      for (int i = 0; i < kSteps; ++i) {
        const int64_t rows = group->getRank() == 1 && i >= 6 ? 2 : 5;
        const at::Tensor x = seeded(10 * i + group->getRank(), [&] { return at::randn({rows, 3}); });
        ends.push_back(is_captured ? step(x) : eager(x));
      }
      if (is_captured) EXPECT_GT(step.replays(), 3) << step.last_recapture_reason();
      ends.push_back(norm->running_var.clone());
      ends.push_back(norm->weight.grad().clone());
      return ends;
    };
    const std::vector<at::Tensor> expected = run(false), actual = run(true);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
  });
}

class CapturedTensorParallel : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedTensorParallel, ::testing::ValuesIn(testing::settings({1, 2, 3})),
                         testing::name_of);

TEST_P(CapturedTensorParallel, TrainsAsEagerDoes) {
  on_ranks([&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"tp"}, {.group = group});
    std::vector<Perceptron> nets = {seeded_perceptron(0.25), seeded_perceptron(0.25)};
    std::vector<std::vector<at::Tensor>> losses(2);
    for (int captured = 0; captured < 2; ++captured) {
      Perceptron& net = nets[captured];
      distribute_parameter(net->fc1->weight, mesh, {Shard(0)});
      distribute_parameter(net->fc1->bias, mesh, {Shard(0)});
      distribute_parameter(net->fc2->weight, mesh, {Shard(1)});
      distribute_parameter(net->fc2->bias, mesh, {Replicate()});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      const auto train = [&](const at::Tensor& x) {
        optimizer.zero_grad();
        at::Tensor loss = net(DTensor::from_local(x, mesh, {Replicate()})).square().mean();
        loss.backward();
        optimizer.step();
        return loss;
      };
      manual_seed(11, mesh);
      auto step = capture(train);
      for (int i = 0; i < kSteps; ++i) {
        const at::Tensor x = batch(i, 0);
        losses[captured].push_back(captured ? step(x) : train(x));
      }
      if (captured) {
        EXPECT_EQ(step.replays(), kSteps - 3) << step.last_recapture_reason();
      }
    }
    for (int i = 0; i < kSteps; ++i) {
      EXPECT_TRUE(at::equal(DTensor(losses[0][i]).to_local(), DTensor(losses[1][i]).to_local())) << "step " << i;
    }
    expect_equal_parameters(*nets[1], *nets[0]);
  });
}

}  // namespace
}  // namespace serried
