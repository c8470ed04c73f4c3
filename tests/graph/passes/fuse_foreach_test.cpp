// In-place ops on many tensors become ops on lists.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "tests/graph/passes/recorded.h"

namespace serried {
namespace {

using namespace serried::testing;

// SGD with momentum, as torch::optim writes it.
struct Momentum {
  Tensors parameters{torch::ones({2, 3}), torch::ones({4})};
  Tensors buffers{torch::zeros({2, 3}), torch::zeros({4})};

  Tensors step(const Tensors& gradients) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      buffers[i].mul_(0.9).add_(gradients[i], 1);
      parameters[i].add_(buffers[i], -0.1);
    }
    return {};
  }
};

TEST(FuseForeach, TurnsAnOptimizerIntoOpsOnLists) {
  Momentum eager, captured;
  const Tensors in{torch::randn({2, 3}), torch::randn({4})};
  const Recorded before = record([&](const Tensors& g) { return captured.step(g); }, in);
  EXPECT_EQ(before.graph.nodes().size(), 6u);
  const Recorded after = with(before, {passes::drop_dead(), passes::fuse_foreach()});
  EXPECT_EQ(code_of(after),
            "_foreach_mul_([%p2, %p4], scalar=0.9)\n"
            "_foreach_add_([%p2, %p4], [%in0, %in1])\n"
            "_foreach_add_([%p3, %p5], [%p2, %p4], alpha=-0.1)\n");
  graph::Program program(after.graph, after.groups);
  for (int i = 0; i < 3; ++i) rerun(program, after, in);
  for (int i = 0; i < 5; ++i) eager.step(in);
  for (size_t i = 0; i < in.size(); ++i) expect_equal(captured.parameters[i], eager.parameters[i]);
}

TEST(FuseForeach, KeepsTheOrderOfOpsThatNeedEachOther) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor a = in[0] + 1, b = in[1] + 1;
    a.add_(b);
    b.add_(a);
    a.add_(b);
    return {a, b};
  };
  const Tensors in{torch::randn({3}), torch::randn({3})};
  const Recorded after = with(record(fn, in), {passes::fuse_foreach()});
  EXPECT_EQ(after.graph.count("_foreach_add_"), 0);
  expect_same_results(fn, after, in);
}

TEST(FuseForeach, AnOpStaysBehindTheViewsThatItReads) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor a = in[1] + 1, b = in[1] + 2, c = in[1] + 3;
    a.add_(in[0][0]);
    b.add_(in[0][1]);
    c.add_(in[0].t().select(1, 2));
    return {a, b, c};
  };
  const Tensors in{torch::randn({3, 5}), torch::randn({5})};
  const Recorded after = with(record(fn, in), {passes::fuse_foreach()});
  expect_same_results(fn, after, in);
}

TEST(FuseForeach, ViewsMadeBeforeDoNotKeepOpsApart) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor a = in[1] + 1, b = in[1] + 2;
    const at::Tensor first = in[0][0], second = in[0][1];
    a.add_(first);
    b.add_(second);
    return {a, b};
  };
  const Tensors in{torch::randn({3, 5}), torch::randn({5})};
  const Recorded after = with(record(fn, in), {passes::fuse_foreach()});
  EXPECT_EQ(after.graph.count("_foreach_add_"), 1) << code_of(after);
  expect_same_results(fn, after, in);
}

TEST(FuseForeach, OpsOnMemoryThatCannotBeToldStayWhereTheyAre) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor a = in[0] + 1, b = in[1] + 1;
    a.add_(in[0]);
    b.add_(in[0]);
    return {a, b};
  };
  const Tensors in{torch::randn({3}), torch::randn({3})};
  Recorded recorded = record(fn, in);
  for (graph::Value& value : recorded.graph.values()) value.storage = -1;
  const Recorded after = with(recorded, passes::defaults());
  EXPECT_EQ(after.graph.count("_foreach_add_"), 0) << code_of(after);
  expect_same_results(fn, after, in);
}

TEST(FuseForeach, CopiesOutOfABucketStayBehindTheirViews) {
  std::vector<Pass> list = passes::defaults();
  list.insert(list.begin(), {passes::bucket_collectives(), passes::overlap()});
  run_ranks(2, [&](const Group& group) {
    torch::nn::Linear net(8, 4);
    auto step = capture(
        [&](const at::Tensor& x) {
          net->zero_grad();
          net(x).sum().backward();
          for (at::Tensor& p : net->parameters()) all_reduce_(p.mutable_grad(), group);
        },
        {.passes = list});
    for (int i = 0; i < 6; ++i) {
      step(torch::full({3, 8}, double(i + group->getRank())));
      // Three rows of i and three of i + 1.
      expect_equal(net->weight.grad(), torch::full({4, 8}, 6.0 * i + 3));
      expect_equal(net->bias.grad(), torch::full({4}, 6.0));
    }
    EXPECT_GT(step.replays(), 0);
  });
}

TEST(FuseForeach, JoinsOnlyEqualConstants) {
  const Function fn = [](const Tensors& in) -> Tensors {
    Tensors out;
    for (int i = 0; i < 6; ++i) out.push_back(in[0] * i);
    for (int i = 0; i < 6; ++i) out[i].addcmul_(in[0], in[1], i % 2).addcdiv_(in[0], in[1], 2);
    return out;
  };
  const Tensors in{torch::randn({3}), torch::randn({3})};
  const Recorded after = with(record(fn, in), {passes::fuse_foreach()});
  EXPECT_EQ(after.graph.count("_foreach_addcmul_"), 2);
  EXPECT_EQ(after.graph.count("_foreach_addcdiv_"), 1) << code_of(after);
  expect_same_results(fn, after, in);
}

}  // namespace
}  // namespace serried
