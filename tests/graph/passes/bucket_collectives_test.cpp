// Collectives that follow each other become one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

using OnGroup = std::function<Tensors(const Tensors&, const Group&)>;

Tensors inputs_of(const Group& group) {
  torch::Generator generator = at::detail::createCPUGenerator(uint64_t(7 + group->getRank()));
  return {torch::randn({6, 2}, generator), torch::randn({5}, generator), torch::randn({12, 3}, generator)};
}

// Bitwise the same on 1 to 3 ranks, with one collective in the end.
void expect_one(const std::string& collective, const OnGroup& fn) {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const Function here = [&](const Tensors& in) { return fn(in, group); };
      const Tensors in = inputs_of(group);
      const Recorded after = with(record(here, in), {passes::bucket_collectives()});
      EXPECT_EQ(after.graph.count(collective), 1) << code_of(after);
      expect_same_results(here, after, in);
      expect_same_results(here, with(after, passes::defaults()), in);
    });
  }
}

TEST(BucketCollectives, JoinsWhatFollows) {
  const Group group = fake_group(0, 2);
  const Function fn = [&](const Tensors& in) -> Tensors {
    const at::Tensor a = all_reduce(in[0].exp(), group), b = all_reduce(in[1].exp(), group);
    return {a + 1, b};
  };
  const Recorded before = record(fn, {torch::randn({2, 3}), torch::randn({4})});
  EXPECT_EQ(code_of(before),
            "%2 = exp(%in0)  # f32[2, 3]\n"
            "%3 = all_reduce(%2, group=\"g\", op=sum)  # f32[2, 3], 24 B\n"
            "%4 = exp(%in1)  # f32[4]\n"
            "%5 = all_reduce(%4, group=\"g\", op=sum)  # f32[4], 16 B\n"
            "%6 = add(%3, other=1)  # f32[2, 3]\n");
  EXPECT_EQ(code_of(with(before, {passes::bucket_collectives()})),
            "%2 = exp(%in0)  # f32[2, 3]\n"
            "%4 = exp(%in1)  # f32[4]\n"
            "%7 = view(%2, size=[6])  # f32[6]\n"
            "%8 = view(%4, size=[4])  # f32[4]\n"
            "%9 = cat([%7, %8])  # f32[10]\n"
            "all_reduce_(%9, group=\"g\", op=sum)  # 40 B\n"
            "%3 = as_strided(%9, size=[2, 3], stride=[3, 1], storage_offset=0)  # f32[2, 3]\n"
            "%5 = as_strided(%9, size=[4], stride=[1], storage_offset=6)  # f32[4]\n"
            "%6 = add(%3, other=1)  # f32[2, 3]\n");
}

TEST(BucketCollectives, AllReducesGiveTheSame) {
  expect_one("all_reduce", [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_reduce(in[0].t(), group), b = all_reduce(in[1], group), c = all_reduce(in[2], group);
    return {a.t() * 2, b, c.select(1, 1).mul_(3), c};
  });
}

TEST(BucketCollectives, AllReducesInPlaceGiveTheSame) {
  expect_one("all_reduce", [](const Tensors& in, const Group& group) -> Tensors {
    at::Tensor a = in[0].exp(), b = in[1].exp(), c = in[2].exp();
    all_reduce_(a.t(), group, c10d::ReduceOp::MAX);
    all_reduce_(b, group, c10d::ReduceOp::MAX);
    all_reduce_(c.select(1, 1), group, c10d::ReduceOp::MAX);
    return {a, b, c};
  });
}

TEST(BucketCollectives, AllGathersGiveTheSame) {
  expect_one("all_gather", [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_gather(in[0].t(), group), b = all_gather(in[1], group), c = all_gather(in[2], group);
    return {a, b + 1, c.t()};
  });
}

TEST(BucketCollectives, ReduceScattersGiveTheSame) {
  expect_one("reduce_scatter", [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = reduce_scatter(in[0], group), b = reduce_scatter(in[2], group);
    return {a.mul_(2), b.t() + 1};
  });
}

TEST(BucketCollectives, AllReducesOfC10dGiveTheSame) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    Tensors out;
    for (const at::Tensor& x : in) {
      Tensors one{x.exp()};
      group->allreduce(one)->wait();
      out.push_back(one[0]);
    }
    return out;
  };
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const Function here = [&](const Tensors& in) { return fn(in, group); };
      const Tensors in = inputs_of(group);
      const Recorded after = with(record(here, in), {passes::functional_collectives(), passes::bucket_collectives()});
      EXPECT_EQ(after.graph.count("all_reduce"), 1) << code_of(after);
      expect_same_results(here, with(after, passes::defaults()), in);
    });
  }
}

int64_t num_left(const OnGroup& fn, const std::vector<Pass>& list) {
  const Group group = fake_group(0, 3);
  const Recorded after = with(record([&](const Tensors& in) { return fn(in, group); }, inputs_of(group)), list);
  return int64_t(after.graph.collectives().size());
}

TEST(BucketCollectives, StopsAtAUse) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_reduce(in[0], group);
    return {all_reduce(in[1], group), all_reduce(in[0] + a, group)};
  };
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives()}), 2);
}

TEST(BucketCollectives, StopsAtAnotherCollective) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_reduce(in[0], group), b = all_reduce(in[0], group, c10d::ReduceOp::MAX);
    return {a, b, all_reduce(in[1], group)};
  };
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives()}), 3);
}

TEST(BucketCollectives, StopsAtAnotherGroup) {
  const Group other = fake_group(0, 2);
  const OnGroup fn = [&](const Tensors& in, const Group& group) -> Tensors {
    const at::Tensor a = all_reduce(in[0], group), b = all_reduce(in[0], other);
    return {a, b, all_reduce(in[1], group)};
  };
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives()}), 3);
}

TEST(BucketCollectives, StopsAtTheLimit) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    Tensors out;
    for (int i = 0; i < 8; ++i) out.push_back(all_reduce(in[1], group));  // 20 bytes each
    return out;
  };
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives(65.0 / (1 << 20))}), 3);
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives(1e-6)}), 8);
}

TEST(BucketCollectives, LeavesPiecesOfOtherDimsAlone) {
  const OnGroup fn = [](const Tensors& in, const Group& group) -> Tensors {
    return {all_gather(in[0], group, {.dim = 1}), all_gather(in[2], group, {.dim = 1})};
  };
  EXPECT_EQ(num_left(fn, {passes::bucket_collectives()}), 2);
}

TEST(BucketCollectives, RefusesAnEmptyBucket) {
  EXPECT_EQ(error_text<c10::ValueError>([] { passes::bucket_collectives(0); }),
            "[bucket_collectives] a bucket of 0 MiB holds nothing\n"
            "  fix: give a size above 0, or leave the pass out");
}

}  // namespace
}  // namespace serried
