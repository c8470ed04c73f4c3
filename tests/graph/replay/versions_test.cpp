// Version counters of parameters and gradients after each call of a captured step are those of the eager one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"

namespace serried {
namespace {

constexpr int kVersionCalls = 9;

struct VersionedStep {
  std::vector<at::Tensor> parameters;
  std::function<void(const at::Tensor&)> run;
  std::function<void()> between = [] {};
};

void expect_same_versions(const VersionedStep& actual, const VersionedStep& expected, int call) {
  for (size_t k = 0; k < expected.parameters.size(); ++k) {
    const at::Tensor &parameter = actual.parameters[k], &wanted = expected.parameters[k];
    EXPECT_EQ(parameter._version(), wanted._version()) << "parameter " << k << ", call " << call;
    ASSERT_EQ(parameter.grad().defined(), wanted.grad().defined());
    if (!wanted.grad().defined()) continue;
    EXPECT_TRUE(at::equal(parameter.grad(), wanted.grad())) << "parameter " << k << ", call " << call;
    EXPECT_EQ(parameter.grad()._version(), wanted.grad()._version()) << "gradient " << k << ", call " << call;
  }
}

void expect_versions_of_eager(const std::function<VersionedStep()>& make) {
  const VersionedStep eager = make(), captured = make();
  auto step = capture([&](const at::Tensor& x) { captured.run(x); });
  for (int i = 0; i < kVersionCalls; ++i) {
    const at::Tensor x = torch::full({3, 5}, 0.1F * float(i + 1));
    eager.run(x);
    step(x);
    expect_same_versions(captured, eager, i);
    eager.between();
    captured.between();
  }
  EXPECT_GE(step.replays(), kVersionCalls - 5) << step.last_recapture_reason();
}

torch::nn::Sequential versioned_net() {
  return seeded(
      1, [] { return torch::nn::Sequential(torch::nn::Linear(5, 5), torch::nn::ReLU(), torch::nn::Linear(5, 2)); });
}

VersionedStep zeroed_step(bool set_to_none, int num_backwards) {
  auto net = versioned_net();
  const auto optimizer = std::make_shared<SGD>(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  return {net->parameters(), [=](const at::Tensor& x) mutable {
            optimizer->zero_grad(set_to_none);
            for (int i = 0; i < num_backwards; ++i) net->forward(x * (i + 1)).square().sum().backward();
            optimizer->step();
          }};
}

TEST(CaptureVersions, WithGradientsMadeAnew) {
  expect_versions_of_eager([] { return zeroed_step(/*set_to_none=*/true, 1); });
}

TEST(CaptureVersions, WithGradientsZeroed) {
  expect_versions_of_eager([] { return zeroed_step(/*set_to_none=*/false, 1); });
}

TEST(CaptureVersions, WithTwoBackwardsInside) {
  for (const bool set_to_none : {true, false}) {
    expect_versions_of_eager([=] { return zeroed_step(set_to_none, 2); });
  }
}

TEST(CaptureVersions, WithAWeightUsedTwice) {
  expect_versions_of_eager([] {
    const at::Tensor weight = torch::full({5, 5}, 0.1F).requires_grad_();
    return VersionedStep{{weight}, [=](const at::Tensor& x) mutable {
                           weight.mutable_grad().reset();
                           x.mm(weight).mm(weight).square().sum().backward();
                         }};
  });
}

TEST(CaptureVersions, WithAParameterAndAViewOfItWrittenInTurn) {
  expect_versions_of_eager([] {
    const at::Tensor weight = torch::full({5, 5}, 0.1F), row = weight[2];
    return VersionedStep{{weight, row}, [=](const at::Tensor& x) mutable {
                           row.add_(x[0]);
                           weight.mul_(0.5);
                         }};
  });
}

VersionedStep data_parallel_step(const Group& group, bool gradient_as_bucket_view, bool zeroes_inside) {
  auto net = versioned_net();
  using Ddp = DistributedDataParallel<torch::nn::Sequential>;
  const auto ddp = std::make_shared<Ddp>(
      net, DistributedDataParallelOptions{.process_group = group, .gradient_as_bucket_view = gradient_as_bucket_view});
  const std::function<void()> zero = [net]() mutable { net->zero_grad(); };
  return {net->parameters(),
          [=](const at::Tensor& x) mutable {
            if (zeroes_inside) zero();
            (*ddp)(x).square().sum().backward();
          },
          zeroes_inside ? std::function<void()>([] {}) : zero};
}

TEST(CaptureVersions, OfGradientsInBuckets) {
  run_ranks(2, [](const Group& group) {
    for (const bool as_view : {true, false}) {
      for (const bool zeroes_inside : {true, false}) {
        SCOPED_TRACE(c10::str("gradient_as_bucket_view ", as_view, ", zero_grad inside ", zeroes_inside));
        expect_versions_of_eager([&] { return data_parallel_step(group, as_view, zeroes_inside); });
      }
    }
  });
}

}  // namespace
}  // namespace serried
