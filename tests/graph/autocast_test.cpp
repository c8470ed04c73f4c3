// Under autocast the casts are nodes of the graph, and a replay casts nothing itself.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/tensor/random/random.h"

namespace serried {
namespace {

/// bfloat16 for the ops that autocast lists, while alive; with a cache of cast weights, as Python's scope has.
class AutocastScope {
 public:
  AutocastScope() : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool was_enabled_;
};

at::Tensor batch(int step) {
  return seeded(50 + step, [] { return torch::randn({4, 6}); });
}

/// Losses of ten steps, with the forward in an AutocastScope.
std::vector<at::Tensor> train(bool captured, int64_t* replays) {
  auto net = seeded(5, [] {
    return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                                 torch::nn::Linear(8, 3));
  });
  AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto eager = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const AutocastScope scope;
      loss = torch::softmax(net->forward(x), 1).square().mean();
    }
    loss.backward();
    optimizer.step();
    return loss;
  };
  auto step = capture(eager);
  std::vector<at::Tensor> losses;
  for (int i = 0; i < 10; ++i) losses.push_back(captured ? step(batch(i)) : eager(batch(i)));
  *replays = step.replays();
  return losses;
}

TEST(CapturedAutocast, TrainsAsEagerDoes) {
  int64_t replays = 0;
  const std::vector<at::Tensor> expected = train(false, &replays), actual = train(true, &replays);
  EXPECT_GE(replays, 5);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "step " << i;
}

TEST(CapturedAutocast, ReplaysOutOfPlaceFormsOfComplexNumbersUncast) {
  // Not dense real tensors, so these ops go through the dispatcher, where autocast would see them.
  const at::Tensor weight = torch::randn({3, 3}, at::kComplexFloat);
  const auto eager = [&](const at::Tensor& x) {
    const at::Tensor half = at::real(x).to(at::kBFloat16);
    return at::mm(x, weight) + at::mm(half, half).to(at::kComplexFloat);
  };
  auto step = capture(eager);
  const AutocastScope scope;
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = seeded(70 + i, [] { return torch::randn({3, 3}, at::kComplexFloat); });
    EXPECT_TRUE(at::equal(step(x), eager(x))) << "call " << i;
  }
  EXPECT_GT(step.replays(), 1);
}

}  // namespace
}  // namespace serried
