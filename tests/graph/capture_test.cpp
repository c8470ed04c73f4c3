// A captured step beside the same step run eagerly.
#include "serried/graph/capture.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

namespace serried {
namespace {

struct PerceptronsImpl : torch::nn::Module {
  PerceptronsImpl(int layers, int width, double dropout = 0) : dropout_(dropout) {
    for (int i = 0; i < layers; ++i) {
      linears.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& linear : linears) {
      x = torch::relu(linear(x));
      if (dropout_ > 0) x = torch::dropout(x, dropout_, is_training());
    }
    return x;
  }
  std::vector<torch::nn::Linear> linears;
  double dropout_;
};
TORCH_MODULE(Perceptrons);

struct SgdTrainer {
  SgdTrainer(double momentum, double dropout)
      : net((torch::manual_seed(1), 4), 16, dropout),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(momentum)) {}
  at::Tensor step(const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    at::Tensor loss = torch::mse_loss(net(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  }
  Perceptrons net;
  torch::optim::SGD optimizer;
};

void expect_same_training(double momentum, double dropout) {
  std::vector<at::Tensor> xs, ys;
  for (int i = 0; i < 20; ++i) {
    xs.push_back(torch::randn({8, 16}));
    ys.push_back(torch::randn({8, 16}));
  }
  SgdTrainer eager(momentum, dropout);
  torch::manual_seed(5);
  std::vector<at::Tensor> losses;
  for (int i = 0; i < 20; ++i) losses.push_back(eager.step(xs[i], ys[i]));

  SgdTrainer trainer(momentum, dropout);
  auto step = capture([&](const at::Tensor& x, const at::Tensor& y) { return trainer.step(x, y); });
  torch::manual_seed(5);
  for (int i = 0; i < 20; ++i) {
    const at::Tensor loss = step(xs[i], ys[i]);
    EXPECT_TRUE(at::equal(loss, losses[i])) << "step " << i;
  }
  EXPECT_EQ(step.captures(), 1) << step.last_recapture_reason();
  EXPECT_EQ(step.replays(), 17);
  for (size_t k = 0; k < eager.net->parameters().size(); ++k) {
    EXPECT_TRUE(at::equal(eager.net->parameters()[k], trainer.net->parameters()[k]));
    EXPECT_TRUE(at::equal(eager.net->parameters()[k].grad(), trainer.net->parameters()[k].grad()));
    EXPECT_EQ(eager.net->parameters()[k]._version(), trainer.net->parameters()[k]._version());
  }
}

TEST(Capture, TrainsAsEagerDoes) {
  expect_same_training(0, 0);
}

TEST(Capture, TrainsAsEagerDoesWithMomentum) {
  expect_same_training(0.9, 0);
}

TEST(Capture, TrainsAsEagerDoesWithDropout) {
  expect_same_training(0.9, 0.3);
}

// Its kernel keeps a workspace for backward only where gradients are on.
TEST(Capture, TrainsARecurrentNetAsEagerDoes) {
  std::vector<at::Tensor> losses[2];
  for (int captured = 0; captured < 2; ++captured) {
    torch::manual_seed(4);
    torch::nn::LSTM net(torch::nn::LSTMOptions(3, 5).num_layers(2).batch_first(true));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    const auto train = [&](const at::Tensor& x) {
      optimizer.zero_grad();
      at::Tensor loss = std::get<0>(net(x)).square().mean();
      loss.backward();
      optimizer.step();
      return loss.detach();
    };
    auto step = capture(train);
    for (int i = 0; i < 8; ++i) {
      const at::Tensor x = torch::full({2, 4, 3}, 0.1f * i);
      losses[captured].push_back(captured ? step(x) : train(x));
    }
    EXPECT_EQ(step.replays() > 3, captured == 1);
  }
  for (size_t i = 0; i < losses[0].size(); ++i) EXPECT_TRUE(at::equal(losses[0][i], losses[1][i])) << "step " << i;
}

}  // namespace
}  // namespace serried
