// Collectives start early and are waited for late.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives.h"
#include "serried/comm/ranks.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

TEST(Overlap, StartsEarlyAndWaitsLate) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor a = in[0].exp(), b = in[0].sin();
    const at::Tensor sum = all_reduce(a, group);
    return {b.cos().add(sum)};
  };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%1 = exp(%in0)  # f32[4]\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "%3 = all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%4 = cos(%2)  # f32[4]\n"
            "%5 = add(%4, %3)  # f32[4]\n");
  EXPECT_EQ(code_of(with(before, {passes::overlap()})),
            "%1 = exp(%in0)  # f32[4]\n"
            "%3, %w6 = start_all_reduce(%1, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%2 = sin(%in0)  # f32[4]\n"
            "%4 = cos(%2)  # f32[4]\n"
            "serried::wait(%w6)\n"
            "%5 = add(%4, %3)  # f32[4]\n");
}

Tensors all_kinds(const Tensors& in, const Group& group) {
  const at::Tensor a = all_reduce(in[0].exp(), group, c10d::ReduceOp::AVG);
  const at::Tensor b = all_gather(in[0].sin(), group);
  const at::Tensor c = reduce_scatter(in[0].cos().repeat({group->getSize(), 1}), group);
  at::Tensor d = in[0].tan();
  all_reduce_(d, group);
  const at::Tensor e = all_reduce(all_reduce(d, group), group, c10d::ReduceOp::MAX);
  d.add_(1);
  return {a + c, b, d, e, all_gather(a, group, {.dim = 1})};
}

TEST(Overlap, GivesTheSameOnAllBackends) {
  for (const std::string backend : {"threads", "gloo"}) {
    const auto check = [](const Group& group) {
      const Function fn = [&](const Tensors& in) { return all_kinds(in, group); };
      torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
      const Tensors in{torch::randn({5, 3}, generator)};
      const Recorded recorded = record(fn, in);
      for (const auto& list : {std::vector<Pass>{passes::overlap()}, {passes::overlap(1)}}) {
        const Recorded after = with(recorded, list);
        EXPECT_EQ(after.graph.count("wait"), 5);
        expect_same_results(fn, after, in);
        expect_same_results(fn, with(after, passes::defaults()), in);
      }
    };
    for (int world_size : {1, 2, 3}) run_ranks(world_size, check, {.backend = backend});
  }
}

TEST(Overlap, KeepsTheOrderOfCollectives) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor late = all_reduce(in[0].exp(), group);
    return {late, all_gather(in[0], group)};
  };
  const Recorded after = with(record(fn, {torch::randn({4})}), {passes::overlap()});
  std::vector<std::string> order;
  for (size_t i : after.graph.collectives()) order.push_back(after.graph.nodes()[i].short_name());
  EXPECT_EQ(order, (std::vector<std::string>{"all_reduce", "all_gather"}));
}

TEST(Overlap, BoundsWhatIsOnItsWay) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    Tensors out;
    for (int i = 0; i < 3; ++i) out.push_back(all_reduce(in[0], group));  // 16 bytes each
    return out;
  };
  const Recorded before = record(fn, {torch::randn({4})});
  EXPECT_EQ(code_of(with(before, {passes::overlap(32)})),
            "%1, %w4 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%2, %w5 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "serried::wait(%w4)\n"
            "%3, %w6 = start_all_reduce(%in0, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "serried::wait(%w5)\n"
            "serried::wait(%w6)\n");
}

TEST(Overlap, WaitsBeforeTheOperandChanges) {
  for (int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      const Function fn = [&](const Tensors& in) -> Tensors {
        at::Tensor a = in[0].exp();
        const at::Tensor sum = all_reduce(a, group);
        a.mul_(7);
        return {sum, a};
      };
      const Tensors in{torch::randn({1000})};
      expect_same_results(fn, with(record(fn, in), {passes::overlap()}), in);
    });
  }
}

TEST(Overlap, RefusesALimitOfNothing) {
  EXPECT_EQ(error_text<c10::ValueError>([] { passes::overlap(0); }),
            "[overlap] with 0 bytes in flight nothing can overlap\n"
            "  fix: give a limit above 0, or leave the pass out");
}

}  // namespace
}  // namespace serried
