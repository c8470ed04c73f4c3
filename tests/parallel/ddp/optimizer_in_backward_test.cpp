// Steps inside backward give the same bits as steps after it.
#include "serried/parallel/ddp/optimizer_in_backward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using ::testing::AllOf;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::OnRanks;

struct SteppedImpl : torch::nn::Module {
  SteppedImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("unused", unused);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::gelu(fc1(x))); }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3}, unused{2, 2};
};
TORCH_MODULE(Stepped);

Stepped stepped_net() {
  return seeded(0, [] { return Stepped(); });
}

at::Tensor step_batch(int rank, int step) {
  return seeded(100 * rank + step + 1, [] { return at::randn({2, 5}); });
}

DistributedDataParallelOptions stepped_options(const Group& group, bool as_view = true) {
  return {.process_group = group,
          .bucket_caps_mb = {0.0001},
          .find_unused_parameters = true,
          .gradient_as_bucket_view = as_view};
}

std::unique_ptr<torch::optim::Optimizer> momentum(std::vector<at::Tensor> parameters) {
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
  return std::make_unique<torch::optim::SGD>(std::move(parameters), options);
}
std::unique_ptr<torch::optim::Optimizer> adam(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.01));
}
std::unique_ptr<torch::optim::Optimizer> adam_w(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
}

void change_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

/// Five steps of backward() and then step(), with the learning rate `lr` from the fourth on.
Stepped stepped_afterwards(const Group& group, const OptimizerFactory& factory, double lr,
                           const std::optional<CommHook>& hook = {}) {
  Stepped net = stepped_net();
  DistributedDataParallel ddp(net, stepped_options(group));
  if (hook) ddp.register_comm_hook(*hook);
  const auto optimizer = factory(ddp.parameters());
  for (int step = 0; step < 5; ++step) {
    if (step == 3) change_lr(*optimizer, lr);
    optimizer->zero_grad();
    ddp(step_batch(group->getRank(), step)).pow(2).mean().backward();
    optimizer->step();
  }
  return net;
}

void expect_stepped(torch::nn::Module& actual, torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    expect_equal(item.value().detach(), wanted[item.key()].detach(), item.key());
  }
}

class InBackward : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, InBackward, ::testing::ValuesIn(testing::settings({1, 2, 3})), testing::name_of);

TEST_P(InBackward, GivesTheSameBitsAsStepsAfterwards) {
  on_ranks([&](const Group& group) {
    for (const auto& factory : {momentum, adam, adam_w}) {
      for (const bool as_view : {true, false}) {
        Stepped net = stepped_net();
        DistributedDataParallel ddp(net, stepped_options(group, as_view));
        const auto optimizers = optimizer_in_backward(ddp, factory);
        ASSERT_EQ(optimizers.size(), 6u);
        for (int step = 0; step < 5; ++step) {
          if (step == 3) optimizers.set_lr(0.02);
          ddp(step_batch(group->getRank(), step)).pow(2).mean().backward();
          for (const at::Tensor& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
        }
        expect_stepped(*net, *stepped_afterwards(group, factory, 0.02));
        // The unused layer has not been touched, by weight decay neither.
        expect_equal(net->unused->weight.detach(), stepped_net()->unused->weight.detach());
        EXPECT_EQ(optimizers[0].state().size(), 1u);
      }
    }
  });
}

TEST_P(InBackward, StepsAfterACommunicationHook) {
  on_ranks([&](const Group& group) {
    const CommHook hook = hooks::fp16_compress();
    Stepped net = stepped_net();
    DistributedDataParallel ddp(net, stepped_options(group));
    ddp.register_comm_hook(hook);
    optimizer_in_backward(ddp, momentum);
    for (int step = 0; step < 5; ++step) ddp(step_batch(group->getRank(), step)).pow(2).mean().backward();
    expect_stepped(*net, *stepped_afterwards(group, momentum, 0.1, hook));
  });
}

TEST_P(InBackward, JoinedRanksStepToo) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    Stepped net = stepped_net(), afterwards = stepped_net();
    DistributedDataParallel ddp(net, stepped_options(group)), ddp_afterwards(afterwards, stepped_options(group));
    optimizer_in_backward(ddp, adam);
    const auto optimizer = adam(ddp_afterwards.parameters());
    join({&ddp}, [&] {
      for (int step = 0; step <= rank; ++step) ddp(step_batch(rank, step)).pow(2).mean().backward();
    });
    join({&ddp_afterwards}, [&] {
      for (int step = 0; step <= rank; ++step) {
        optimizer->zero_grad();
        ddp_afterwards(step_batch(rank, step)).pow(2).mean().backward();
        optimizer->step();
      }
    });
    expect_stepped(*net, *afterwards);
    // The states have stayed the same, so an even step keeps the ranks together.
    ddp(step_batch(rank, 0)).pow(2).mean().backward();
    at::Tensor of_first = net->fc1->weight.detach().clone();
    broadcast_(of_first, group);
    expect_equal(net->fc1->weight.detach(), of_first);
  });
}

TEST_P(InBackward, GradientsCannotAddUp) {
  on_ranks([&](const Group& group) {
    Stepped net = stepped_net();
    DistributedDataParallel ddp(net, stepped_options(group));
    optimizer_in_backward(ddp, [](auto params) { return std::make_unique<torch::optim::SGD>(params, 0.1); });
    EXPECT_THAT(error_text<c10::ValueError>([&] { auto guard = ddp.no_sync(); }),
                AllOf(HasSubstr("[no_sync] with optimizer_in_backward, gradients are used up by each backward"),
                      HasSubstr("fix: make one backward per step")));
  });
}

TEST_P(InBackward, IsSetOnce) {
  on_ranks([&](const Group& group) {
    Stepped net = stepped_net();
    DistributedDataParallel ddp(net, stepped_options(group));
    optimizer_in_backward(ddp, momentum);
    EXPECT_THAT(error_text<c10::ValueError>([&] { optimizer_in_backward(ddp, adam); }),
                AllOf(HasSubstr("[optimizer_in_backward] this module has optimizers in its backward already"),
                      HasSubstr("fix: call it once")));
  });
}

TEST_P(InBackward, StepsParametersInFullPrecision) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    DistributedDataParallelOptions options = stepped_options(group);
    options.mixed_precision = {.param_dtype = at::kBFloat16};
    Stepped net = stepped_net(), afterwards = stepped_net();
    DistributedDataParallel ddp(net, options), ddp_afterwards(afterwards, options);
    optimizer_in_backward(ddp, adam);
    const auto optimizer = adam(ddp_afterwards.parameters());
    for (int step = 0; step < 3; ++step) {
      ddp(step_batch(rank, step)).pow(2).mean().backward();
      optimizer->zero_grad();
      ddp_afterwards(step_batch(rank, step)).pow(2).mean().backward();
      optimizer->step();
    }
    EXPECT_EQ(net->fc1->weight.scalar_type(), at::kFloat);
    EXPECT_FALSE(net->fc1->weight.equal(stepped_net()->fc1->weight));
    expect_stepped(*net, *afterwards);
  });
}

TEST_P(InBackward, NeedsAllParametersInBuckets) {
  on_ranks([&](const Group& group) {
    Stepped net = stepped_net();
    DistributedDataParallelOptions options = stepped_options(group);
    options.delay_all_reduce = {.parameters = {"fc2.weight"}, .trigger = "fc1.weight"};
    DistributedDataParallel ddp(net, options);
    EXPECT_THAT(error_text<c10::ValueError>([&] { optimizer_in_backward(ddp, momentum); }),
                HasSubstr("[optimizer_in_backward] delay_all_reduce keeps some gradients out of the buckets"));
  });
}

TEST_P(InBackward, NeedsAnOptimizerThatStepsOnce) {
  on_ranks([&](const Group& group) {
    Stepped net = stepped_net();
    DistributedDataParallel ddp(net, stepped_options(group));
    const auto lbfgs = [](auto params) { return std::make_unique<torch::optim::LBFGS>(params, 1.0); };
    EXPECT_THAT(error_text<c10::ValueError>([&] { optimizer_in_backward(ddp, lbfgs); }),
                AllOf(HasSubstr("[optimizer_in_backward] LBFGS evaluates the loss several times per step"),
                      HasSubstr("fix: call LBFGS's step(closure) after backward")));
    const auto none = [](auto) { return std::unique_ptr<torch::optim::SGD>(); };
    EXPECT_THAT(error_text<c10::ValueError>([&] { optimizer_in_backward(ddp, none); }),
                HasSubstr("[optimizer_in_backward] the factory gave no optimizer for fc1.weight"));
  });
}

}  // namespace
}  // namespace serried
