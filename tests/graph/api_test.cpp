// Capture as users write it, through the one public header.
#include <serried/serried.h>

#include <gtest/gtest.h>

#include "tests/support/close.h"

namespace {

using namespace serried;
using serried::testing::expect_close;

TEST(CaptureApi, HoldsAsDocumented) {
  torch::nn::Linear net = seeded(0, [] { return torch::nn::Linear(3, 2); });
  torch::nn::Linear plain = seeded(0, [] { return torch::nn::Linear(3, 2); });
  serried::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::optim::AdamW expected(plain->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto loss_fn = [](const at::Tensor& a, const at::Tensor& b) { return at::mse_loss(a, b); };
  auto step = capture([&](const at::Tensor& x, const at::Tensor& y) {
    opt.zero_grad();
    auto loss = loss_fn(net->forward(x), y);
    loss.backward();
    opt.step();
    return loss;
  });
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = at::full({4, 3}, i / 10.), y = at::ones({4, 2});
    expected.zero_grad();
    const at::Tensor eager = loss_fn(plain->forward(x), y);
    eager.backward();
    expected.step();
    at::Tensor loss = step(x, y);
    expect_close(loss, eager, std::to_string(i));
  }
  expect_close(net->weight, plain->weight);
  EXPECT_EQ(step.captures(), 1);
  EXPECT_GE(step.replays(), 4);
  EXPECT_EQ(step.last_recapture_reason(), "");
  EXPECT_NE(step.graph().to_string(), "");
  EXPECT_EQ(step.graph().count("all_reduce"), 0);
  EXPECT_FALSE(step.guards().empty());
}

TEST(CaptureApi, PassesAreChosen) {
  run_ranks(2, [](const Group& g) {
    const auto fn = [&](const at::Tensor& x) { return all_reduce(x * 2, g); };
    auto step = capture(fn, {.passes = {passes::bucket_collectives(25), passes::overlap()}, .dynamic = false});
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(step(at::full({3}, 1.)).equal(at::full({3}, 4.)));
    EXPECT_GE(step.replays(), 1);
  });
}

TEST(CaptureApi, StockAdamSaysWhatToUse) {
  torch::nn::Linear net(3, 2);
  torch::optim::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-3));
  auto step = capture([&](const at::Tensor& x) {
    opt.zero_grad();
    net->forward(x).sum().backward();
    opt.step();
  });
  EXPECT_THROW(for (int i = 0; i < 4; ++i) step(at::ones({4, 3})), c10::NotImplementedError);
}

}  // namespace
