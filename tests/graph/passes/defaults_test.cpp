// Every pass, alone and with the others, trains as eager does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "tests/support/close.h"

namespace serried {
namespace {

using namespace serried::testing;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(6, 8));
  net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Dropout(0.25));
  net->push_back(torch::nn::BatchNorm1d(8));
  net->push_back(torch::nn::Linear(8, 3));
  return net;
}

struct Job {
  at::Tensor step(const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    at::Tensor loss = torch::nn::functional::cross_entropy(net->forward(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  }
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01)};
};

void expect_trains_as_eager(const std::vector<Pass>& list) {
  torch::manual_seed(2);
  const at::Tensor x = torch::randn({10, 5, 6}), y = torch::randint(3, {10, 5});
  Job eager, job;
  auto step = capture([&](const at::Tensor& a, const at::Tensor& b) { return job.step(a, b); }, {.passes = list});
  for (int i = 0; i < 10; ++i) {
    torch::manual_seed(i);
    const at::Tensor expected = eager.step(x[i], y[i]);
    torch::manual_seed(i);
    expect_equal(step(x[i], y[i]).detach(), expected.detach(), "loss " + std::to_string(i));
  }
  EXPECT_EQ(step.replays(), 7);
  const auto expected = eager.net->named_parameters(), got = job.net->named_parameters();
  for (const auto& item : expected) {
    expect_equal(got[item.key()].detach(), item.value().detach(), item.key());
    expect_equal(got[item.key()].grad(), item.value().grad(), item.key());
  }
  for (const auto& item : eager.net->named_buffers()) expect_equal(job.net->named_buffers()[item.key()], item.value());
}

TEST(Passes, EachAloneTrainsAsEagerDoes) {
  for (const Pass& pass : {passes::functional_collectives(), passes::drop_dead(), passes::reuse_collectives(),
                           passes::hoist_views(), passes::fuse_foreach(), passes::freeze(), passes::plan_memory(),
                           passes::bucket_collectives(), passes::overlap()}) {
    SCOPED_TRACE(pass.name);
    expect_trains_as_eager({pass});
  }
}

TEST(Passes, AllTogetherTrainAsEagerDoes) {
  expect_trains_as_eager(passes::defaults());
  std::vector<Pass> twice = passes::defaults();
  for (const Pass& pass : passes::defaults()) twice.push_back(pass);
  expect_trains_as_eager(twice);
}

TEST(Passes, DefaultsHaveNames) {
  std::vector<std::string> names;
  for (const Pass& pass : passes::defaults()) names.push_back(pass.name);
  EXPECT_EQ(names, (std::vector<std::string>{"functional_collectives", "drop_dead", "fuse_foreach", "freeze",
                                             "hoist_views", "plan_memory"}));
}

}  // namespace
}  // namespace serried
