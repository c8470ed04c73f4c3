// Several wrappers of the same parameters: each backward is averaged by the one it goes through, or refused.
#include "serried/parallel/ddp/claim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::OnRanks;

struct HeadedImpl : torch::nn::Module {
  HeadedImpl(torch::nn::Linear trunk_, int salt)
      : trunk(std::move(trunk_)), head(seeded(salt, [] { return torch::nn::Linear(4, 2); })) {
    register_module("trunk", trunk);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(trunk(x).tanh()); }
  torch::nn::Linear trunk, head;
};
TORCH_MODULE(Headed);

torch::nn::Linear trunk_of_heads() {
  return seeded(2, [] { return torch::nn::Linear(3, 4); });
}

at::Tensor input_of(const Group& group, int salt = 0) {
  return torch::cos(torch::arange(6, at::kFloat).reshape({2, 3}) + group->getRank() * 5 + salt);
}

/// The mean over `group` of this rank's own gradient.
void expect_mean(const at::Tensor& actual, const at::Tensor& own, const Group& group) {
  at::Tensor mean = own.clone();
  all_reduce_(mean, group, c10d::ReduceOp::SUM);
  expect_close(actual, mean / group->getSize());
}

class Wrappers : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, Wrappers, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(Wrappers, OfOneModuleEachAverageTheBackwardsOfTheirOwnForwards) {
  on_ranks([&](const Group& group) {
    torch::nn::Linear net = trunk_of_heads(), alone = trunk_of_heads();
    const Group own = split_group(group, std::vector<std::vector<int>>(1, {0, 1}));
    DistributedDataParallel wide(net, {.process_group = group});
    std::unique_ptr<DistributedDataParallel<torch::nn::Linear>> narrow;
    if (own) {
      narrow = std::make_unique<DistributedDataParallel<torch::nn::Linear>>(
          net, DistributedDataParallelOptions{.process_group = own, .gradient_as_bucket_view = false});
    }
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      alone(input_of(group, step)).square().sum().backward();
      net->zero_grad();
      wide(input_of(group, step)).square().sum().backward();
      expect_mean(net->weight.grad(), alone->weight.grad(), group);
      if (!own) continue;
      net->zero_grad();
      (*narrow)(input_of(group, step)).square().sum().backward();
      expect_mean(net->weight.grad(), alone->weight.grad(), own);
    }
  });
}

TEST_P(Wrappers, ThatShareAPartEachAverageIt) {
  on_ranks([&](const Group& group) {
    torch::nn::Linear trunk = trunk_of_heads();
    Headed left(trunk, 3), right(trunk, 4);
    Headed plain_left(trunk_of_heads(), 3), plain_right(plain_left->trunk, 4);
    DistributedDataParallel left_ddp(left, {.process_group = group}), right_ddp(right, {.process_group = group});
    for (int step = 0; step < 3; ++step) {
      left->zero_grad();
      right->zero_grad();
      plain_left->zero_grad();
      plain_right->zero_grad();
      left_ddp(input_of(group, step)).square().sum().backward();
      plain_left(input_of(group, step)).square().sum().backward();
      expect_mean(trunk->weight.grad(), plain_left->trunk->weight.grad(), group);
      expect_mean(left->head->weight.grad(), plain_left->head->weight.grad(), group);
      trunk->zero_grad();
      plain_left->trunk->zero_grad();
      right_ddp(input_of(group, step)).square().sum().backward();
      plain_right(input_of(group, step)).square().sum().backward();
      expect_mean(trunk->weight.grad(), plain_left->trunk->weight.grad(), group);
      expect_mean(right->head->weight.grad(), plain_right->head->weight.grad(), group);
    }
  });
}

TEST_P(Wrappers, ThatShareAParameterAreRefusedInOneBackward) {
  on_ranks([&](const Group& group) {
    torch::nn::Linear trunk = trunk_of_heads();
    Headed left(trunk, 3), right(trunk, 4);
    DistributedDataParallel left_ddp(left, {.process_group = group}), right_ddp(right, {.process_group = group});
    const std::string text = error_text<c10::ValueError>(
        [&] { (left_ddp(input_of(group)).sum() + right_ddp(input_of(group)).sum()).backward(); });
    EXPECT_EQ(text, c10::str("[backward] goes through two DistributedDataParallel that share trunk.weight, whose "
                             "gradient would be averaged twice\n"
                             "  fix: call one wrapper in each backward: wrap the outermost module, once\n"
                             "  at:  rank ",
                             group->getRank(), "/", world_size()));
    // Both go on, and no half of an average is left.
    trunk->zero_grad();
    torch::nn::Linear plain = trunk_of_heads();
    Headed alone(plain, 3);
    left->zero_grad();
    left_ddp(input_of(group)).sum().backward();
    alone(input_of(group)).sum().backward();
    expect_mean(trunk->weight.grad(), plain->weight.grad(), group);
  });
}

TEST(WrappersInARow, TakeEachOthersPlace) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net = trunk_of_heads(), alone = trunk_of_heads();
    auto ddp = std::make_unique<DistributedDataParallel<torch::nn::Linear>>(
        net, DistributedDataParallelOptions{.process_group = group});
    (*ddp)(input_of(group)).sum().backward();
    net->zero_grad();
    ddp = std::make_unique<DistributedDataParallel<torch::nn::Linear>>(
        net, DistributedDataParallelOptions{.process_group = group, .static_graph = true});
    (*ddp)(input_of(group)).sum().backward();
    alone(input_of(group)).sum().backward();
    expect_mean(net->weight.grad(), alone->weight.grad(), group);
  });
}

struct OuterImpl : torch::nn::Module {
  OuterImpl(const torch::nn::Linear& part, const Group& group)
      : inner(std::make_shared<DistributedDataParallel<torch::nn::Linear>>(
            part, DistributedDataParallelOptions{.process_group = group})) {
    register_module("inner", inner);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& x) { return last((*inner)(x)); }
  std::shared_ptr<DistributedDataParallel<torch::nn::Linear>> inner;
  torch::nn::Linear last{4, 2};
};
TORCH_MODULE(Outer);

TEST(WrappersInside, AreRefusedUnlessTheirParametersAreIgnored) {
  run_ranks(2, [](const Group& group) {
    Outer outer(trunk_of_heads(), group);
    EXPECT_EQ(error_text<c10::ValueError>([&] { DistributedDataParallel(outer, {.process_group = group}); }),
              c10::str("[DistributedDataParallel] the module contains a DistributedDataParallel, so "
                       "inner.module.weight would be averaged twice\n"
                       "  fix: wrap the outermost module, once; or name the parameters of the inner one in .ignore\n"
                       "  at:  rank ",
                       group->getRank(), "/2"));
    DistributedDataParallel ddp(outer,
                                {.process_group = group, .ignore = {"inner.module.weight", "inner.module.bias"}});
    torch::nn::Linear first = trunk_of_heads();
    ddp(input_of(group)).sum().backward();
    outer->last->forward(first(input_of(group))).sum().backward();
    at::Tensor mean = first->weight.grad().clone();
    all_reduce_(mean, group, c10d::ReduceOp::AVG);
    expect_close(outer->inner->module()->weight.grad(), mean);
  });
}

TEST(WrappersOnThreads, OfOneModuleAreRefused) {
  torch::nn::Linear net = trunk_of_heads();
  run_ranks(2, [&](const Group& group) {
    std::unique_ptr<DistributedDataParallel<torch::nn::Linear>> ddp;
    const auto wrap = [&] {
      ddp = std::make_unique<DistributedDataParallel<torch::nn::Linear>>(
          net, DistributedDataParallelOptions{.process_group = group, .init_sync = false});
    };
    if (group->getRank() == 0) wrap();
    barrier(group);
    if (group->getRank() == 1) {
      EXPECT_EQ(error_text<c10::ValueError>(wrap),
                "[DistributedDataParallel] weight belongs to the module that rank 0 has wrapped\n"
                "  fix: make a module on each rank: ranks that are threads of one process cannot share one\n"
                "  at:  rank 1/2");
    }
    barrier(group);
  });
}

TEST(WrappersInMixedPrecision, AreAloneWithTheirParameters) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net = trunk_of_heads();
    DistributedDataParallel low(net, {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16}});
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { DistributedDataParallel(net, {.process_group = group}); }),
        c10::str("[DistributedDataParallel] weight is in another wrapper, and mixed_precision.param_dtype changes "
                 "its dtype during forward and backward\n"
                 "  fix: drop the first wrapper before making the second, or call its remove_hooks()\n"
                 "  at:  rank ",
                 group->getRank(), "/2"));
    low.remove_hooks();
    torch::nn::Linear alone = trunk_of_heads();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp(input_of(group)).sum().backward();
    alone(input_of(group)).sum().backward();
    expect_mean(net->weight.grad(), alone->weight.grad(), group);
  });
}

}  // namespace
}  // namespace serried
