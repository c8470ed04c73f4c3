// Captured steps of torch::optim's optimizers beside plain ones: the same numbers, and the same step counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"

namespace serried {
namespace {

using ::testing::HasSubstr;

constexpr int kStockCalls = 9;

template <class Optimizer, class Options>
struct StockTrainer {
  explicit StockTrainer(const Options& options)
      : net(seeded(1, [] { return torch::nn::Linear(5, 3); })), optimizer(net->parameters(), options) {}

  at::Tensor step(const at::Tensor& x) {
    optimizer.zero_grad();
    const at::Tensor loss = net(x).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  }

  torch::nn::Linear net;
  Optimizer optimizer;
};

template <class State>
std::vector<int64_t> steps_of(torch::optim::Optimizer& optimizer) {
  std::vector<int64_t> steps;
  for (const at::Tensor& parameter : optimizer.param_groups().at(0).params()) {
    steps.push_back(static_cast<State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl())).step());
  }
  return steps;
}

/// Trains with the listed optimizer captured, and beside it plainly.
template <class Optimizer, class State, class Options>
void expect_same_steps(const std::string& what, const Options& options) {
  SCOPED_TRACE(what);
  StockTrainer<Optimizer, Options> plain(options), trainer(options);
  auto step = capture([&](const at::Tensor& x) { return trainer.step(x); }, {.optimizers = {&trainer.optimizer}});
  for (int i = 0; i < kStockCalls; ++i) {
    const at::Tensor x = seeded(uint64_t(i), [] { return torch::randn({4, 5}); });
    EXPECT_TRUE(at::equal(step(x), plain.step(x))) << i;
    EXPECT_TRUE(at::equal(trainer.net->weight, plain.net->weight)) << i;
    EXPECT_TRUE(at::equal(trainer.net->bias, plain.net->bias)) << i;
    EXPECT_EQ(steps_of<State>(trainer.optimizer), steps_of<State>(plain.optimizer)) << i;
  }
  EXPECT_EQ(step.replays(), kStockCalls - 3) << step.last_recapture_reason();
}

TEST(OptimizerSteps, OfListedOptimizersGoOnInReplays) {
  using namespace torch::optim;
  expect_same_steps<RMSprop, RMSpropParamState>("RMSprop", RMSpropOptions(0.01));
  expect_same_steps<RMSprop, RMSpropParamState>("centered", RMSpropOptions(0.01).momentum(0.5).centered(true));
  expect_same_steps<Adagrad, AdagradParamState>("Adagrad", AdagradOptions(0.1).weight_decay(0.1));
  // Without averages of the past nothing depends on the count.
  expect_same_steps<torch::optim::Adam, AdamParamState>("Adam", AdamOptions(0.1).betas({0, 0}));
  expect_same_steps<torch::optim::AdamW, AdamWParamState>("AdamW", AdamWOptions(0.1).betas({0, 0}).amsgrad(true));
}

TEST(OptimizerSteps, OfOurOwnAreNotCountedTwice) {
  using namespace torch::optim;
  expect_same_steps<serried::Adam, AdamParamState>("Adam", AdamOptions(0.1).amsgrad(true));
  expect_same_steps<serried::AdamW, AdamWParamState>("AdamW", AdamWOptions(0.1));
}

TEST(OptimizerSteps, GoOnFromALoadedCheckpoint) {
  using torch::optim::RMSprop;
  using Trainer = StockTrainer<RMSprop, torch::optim::RMSpropOptions>;
  Trainer trainer(0.01), other(0.01);
  const at::Tensor x = torch::ones({4, 5});
  for (int i = 0; i < 20; ++i) other.step(x);
  std::stringstream saved;
  torch::save(other.optimizer, saved);
  auto step = capture([&](const at::Tensor& each) { return trainer.step(each); }, {.optimizers = {&trainer.optimizer}});
  for (int i = 0; i < 5; ++i) step(x);
  torch::load(trainer.optimizer, saved);
  for (int i = 0; i < 6; ++i) step(x);
  EXPECT_EQ(steps_of<torch::optim::RMSpropParamState>(trainer.optimizer), std::vector<int64_t>(2, 26));
  EXPECT_GE(step.replays(), 4);
}

template <class Optimizer, class Options>
std::string refusal_of_stock(const Options& options) {
  StockTrainer<Optimizer, Options> trainer(options);
  auto step = capture([&](const at::Tensor& x) { return trainer.step(x); });
  try {
    for (int i = 0; i < kStockCalls; ++i) step(torch::ones({4, 5}));
  } catch (const graph::CaptureError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(OptimizerSteps, ThatEnterTheNumbersAreRefused) {
  using namespace torch::optim;
  const auto names_the_scalar = HasSubstr("torch::optim bakes step count and learning rate into scalars");
  EXPECT_THAT((refusal_of_stock<torch::optim::Adam>(AdamOptions(0.1))), names_the_scalar);
  EXPECT_THAT((refusal_of_stock<torch::optim::Adam>(AdamOptions(0.1).amsgrad(true))), names_the_scalar);
  EXPECT_THAT((refusal_of_stock<torch::optim::AdamW>(AdamWOptions(0.1))), names_the_scalar);
  EXPECT_THAT((refusal_of_stock<Adagrad>(AdagradOptions(0.1).lr_decay(1e-3))), names_the_scalar);
}

}  // namespace
}  // namespace serried
