// Collectives of the same data run once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tensor/making/modules.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

using OnGroup = std::function<Tensors(const Tensors&, const Group&)>;

TEST(ReuseCollectives, RunsTheFirstOfTwoAlike) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor a = in[0].exp();
    const at::Tensor one = all_reduce(a, group).sin();
    return {one + all_reduce(a, group).cos()};
  };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%1 = exp(%in0)  # f32[4]\n"
            "%2 = all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%3 = sin(%2)  # f32[4]\n"
            "%4 = all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%5 = cos(%4)  # f32[4]\n"
            "%6 = add(%3, %5)  # f32[4]\n");
  EXPECT_EQ(code_of(with(before, {passes::reuse_collectives()})),
            "%1 = exp(%in0)  # f32[4]\n"
            "%2 = all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%3 = sin(%2)  # f32[4]\n"
            "%5 = cos(%2)  # f32[4]\n"
            "%6 = add(%3, %5)  # f32[4]\n");
}

// Bitwise the same on 1 to 3 ranks, with `num_left` collectives.
void expect_left(size_t num_left, const OnGroup& fn) {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const Function here = [&](const Tensors& in) { return fn(in, group); };
      torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
      const Tensors in{torch::randn({6, 2}, generator), torch::randn({6, 2}, generator)};
      const Recorded after = with(record(here, in), {passes::drop_dead(), passes::reuse_collectives()});
      EXPECT_EQ(after.graph.collectives().size(), num_left) << code_of(after);
      expect_same_results(here, after, in);
      expect_same_results(here, with(after, passes::defaults()), in);
    });
  }
}

TEST(ReuseCollectives, TakesAllKinds) {
  expect_left(5, [](const Tensors& in, const Group& group) -> Tensors {
    Tensors sums;
    for (int k = 0; k < 3; ++k) {
      const at::Tensor x = in[0].detach().t().contiguous();  // a copy each time
      const at::Tensor gathered = all_gather(x, group, {.dim = 1});
      sums.push_back(all_reduce(gathered, group).sum() + k);
      sums.push_back(reduce_scatter(gathered, group, {.dim = 1}).sum());
      sums.push_back(all_to_all(gathered, group, {.split_dim = 1, .concat_dim = 0}).sum());
      sums.push_back(broadcast(x, group).sum());
    }
    return sums;
  });
}

TEST(ReuseCollectives, ReadsViewsOfTheSharedResult) {
  expect_left(1, [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor one = all_reduce(in[0], group), two = all_reduce(in[0], group);
    return {one.t() + 1, two.select(1, 1) + 1, two.view({-1}).exp()};
  });
}

TEST(ReuseCollectives, KeepsTheResultThatTheCallerGets) {
  const OnGroup first = [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor one = all_reduce(in[0], group), two = all_reduce(in[0], group);
    return {one, two + 1};
  };
  const OnGroup second = [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor one = all_reduce(in[0], group), two = all_reduce(in[0], group);
    return {one + 1, two.t()};
  };
  expect_left(1, first);
  expect_left(1, second);
}

TEST(ReuseCollectives, TwoResultsThatTheCallerGetsStayTwo) {
  expect_left(2, [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor one = all_reduce(in[0], group), two = all_reduce(in[0], group), three = all_reduce(in[0], group);
    return {one + three, two, one.t()};
  });
}

TEST(ReuseCollectives, SeesWritesInBetween) {
  expect_left(2, [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor x = in[0].exp();
    const at::Tensor view = x.t();
    const at::Tensor one = all_reduce(x, group) + 1;
    view.mul_(3);
    return {one, all_reduce(x, group) + 1, x};
  });
}

// The op that writes gives back the very tensor that it was given.
TEST(ReuseCollectives, SeesWritesInPlace) {
  expect_left(4, [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor x = in[0].exp(), y = in[1].sin();
    const at::Tensor one = all_reduce(x, group) + all_gather(y, group).sum();
    x.add_(1);
    y.copy_(y * 2);
    return {one, all_reduce(x, group) + all_gather(y, group).sum()};
  });
  expect_left(3, [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor x = in[0].exp();
    at::Tensor sum = all_reduce(x, group) + 1;
    for (int k = 0; k < 2; ++k) sum = sum * 2 + all_reduce(x.mul_(3), group);
    return {sum};
  });
}

TEST(ReuseCollectives, SeesWritesToResults) {
  const OnGroup earlier = [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor one = all_reduce(in[0], group);
    const at::Tensor two = all_reduce(in[0], group);
    one.t().add_(1);
    return {one * 2, two * 2};
  };
  const OnGroup later = [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor one = all_reduce(in[0], group);
    at::Tensor two = all_reduce(in[0], group).add_(1);
    return {one * 2, two * 2};
  };
  expect_left(2, earlier);
  expect_left(2, later);
}

TEST(ReuseCollectives, TellsOtherConstantsAndDataApart) {
  expect_left(6, [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_reduce(in[0], group), b = all_reduce(in[0], group, c10d::ReduceOp::MAX);
    const at::Tensor c = all_reduce(in[1], group), d = all_gather(in[0], group);
    const at::Tensor e = all_gather(in[0], group, {.dim = 1}), f = all_reduce(in[0].t(), group);
    return {a + b + c, d + 1, e + 1, f + 1};
  });
}

TEST(ReuseCollectives, AFactorTellsReductionsApart) {
  expect_left(2, [](const Tensors& in, const Group& group) -> Tensors {
    const auto times = [](double factor) { return c10d::makePreMulSum(factor); };
    return {all_reduce(in[0], group, times(2.0)) + all_reduce(in[0], group, times(3.0))};
  });
}

// Both gradients are the same all-reduced ones until the hook writes one of them.
TEST(ReuseCollectives, AHookMayWriteWhatItIsGiven) {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      const auto eager = [&](const at::Tensor& x) {
        at::Tensor a = (x * 2).requires_grad_();
        at::Tensor one = a * 2, two = a * 3;
        one.register_hook([](const at::Tensor& grad) {
          grad.mul_(5);
          return at::Tensor();
        });
        (all_reduce(one, group) + all_reduce(two, group)).sum().backward();
        return a.grad().clone();
      };
      auto step = capture(eager);
      for (int i = 0; i < 6; ++i) {
        const at::Tensor x = seeded(i, [] { return at::randn({3}); });
        expect_equal(step(x), eager(x), "call " + std::to_string(i));
      }
      EXPECT_EQ(step.replays(), 3) << step.last_recapture_reason();
      EXPECT_EQ(step.graph().count("all_reduce"), 4) << step.graph().to_string();
    });
  }
}

// A Partial is reduced for the loss and again for its gradient.
TEST(ReuseCollectives, ReducesAPartialOncePerStep) {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"tp"}, {.group = group});
      const auto trained = [&](const std::vector<Pass>& list) {
        torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(6, 3); });
        distribute_parameter(net->weight, mesh, {Shard(1)});
        distribute_parameter(net->bias, mesh, {Replicate()});
        const auto eager = [&](const at::Tensor& x) {
          net->zero_grad();
          const at::Tensor y = net(DTensor::from_local(x, mesh, {Replicate()}));
          at::Tensor loss = torch::mse_loss(y, DTensor::from_local(x.narrow(1, 0, 3), mesh, {Replicate()}));
          loss.backward();
          return DTensor(loss.detach()).to_local() + DTensor(net->weight.grad()).to_local().sum();
        };
        auto step = capture(eager, {.passes = list});
        Tensors losses;
        for (int i = 0; i < 6; ++i) losses.push_back(step(seeded(i, [] { return at::randn({5, 6}); })));
        losses.push_back(at::tensor(step.graph().count("all_reduce")));
        return losses;
      };
      std::vector<Pass> list = {passes::drop_dead(), passes::reuse_collectives()};
      for (const Pass& pass : passes::defaults()) list.push_back(pass);
      const Tensors expected = trained(passes::defaults()), got = trained(list);
      for (size_t i = 0; i < 6; ++i) expect_equal(got[i], expected[i], "call " + std::to_string(i));
      EXPECT_LT(got[6].item<int64_t>(), expected[6].item<int64_t>());
    });
  }
}

}  // namespace
}  // namespace serried
