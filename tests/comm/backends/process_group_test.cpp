// The group object and its reductions, row by row: what c10d promises and what serried adds, on every backend.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <limits>
#include <map>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::sample;
using testing::samples;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ProcessGroup : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ProcessGroup, ::testing::ValuesIn(testing::settings({1, 3})), testing::name_of);

Group bare_group() {
  return c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
}

WorkPtr all_reduce_by(const Group& g, at::Tensor& x, const ReduceOp& op) {
  Tensors tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return g->allreduce(tensors, options);
}

// The group is as good as before: the sum of ones is right.
void expect_usable(const Group& g) {
  at::Tensor x = at::ones({3});
  all_reduce_by(g, x, ReduceOp::SUM)->wait();
  expect_equal(x, at::full({3}, float(g->getSize())), "after a refusal");
}

TEST(ProcessGroupDevices, AGroupWithoutABackendRefusesCollectives) {
  const Group group = bare_group();
  at::Tensor x = at::ones({2});
  EXPECT_THROW(all_reduce_by(group, x, ReduceOp::SUM), c10::Error);
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce(x, group); }),
            "[all_reduce] the group has no backend\n  fix: make the group with new_group");
  EXPECT_EQ(error_text<c10::ValueError>([&] { barrier(group); }),
            "[barrier] the group has no backend\n  fix: make the group with new_group");
  expect_equal(x, at::ones({2}), "untouched");
}

TEST(ProcessGroupDevices, AnUnmappedDeviceIsRefusedWithTheMappedOnes) {
  const Group group = bare_group();
  const Group fake = new_group("fake", {.rank = 0, .world_size = 2});
  group->setBackend(at::kMeta, c10d::ProcessGroup::CUSTOM, fake->getDefaultBackend());
  group->setBackend(at::kXPU, c10d::ProcessGroup::CUSTOM, fake->getDefaultBackend());
  EXPECT_FALSE(group->hasBackendForDeviceType(at::kCPU));
  EXPECT_THROW(group->getBackend(at::kCPU), c10::Error);
  EXPECT_EQ(error_text<c10::ValueError>([&] { all_reduce(at::ones({2}), group); }),
            "[all_reduce] f32[2] is on cpu, and group \"" + fake->getGroupName() +
                "\" serves: meta, xpu\n"
                "  fix: move the tensor to a device the group serves, or make the group with {.device = ...}");
}

TEST(ProcessGroupDevices, ABoundDeviceNeedsAnIndex) {
  const Group plain = new_group("fake", {.rank = 0, .world_size = 1});
  EXPECT_FALSE(plain->getBoundDeviceId().has_value());
  EXPECT_THROW(plain->setBoundDeviceId(at::Device(at::kMeta)), c10::Error);
  plain->setBoundDeviceId(at::Device(at::kMeta, 3));
  EXPECT_EQ(plain->getBoundDeviceId(), at::Device(at::kMeta, 3));
  const Group bound = new_group("fake", {.device = at::Device(at::kMeta, 1), .rank = 0, .world_size = 1});
  EXPECT_EQ(bound->getBoundDeviceId(), at::Device(at::kMeta, 1));
}

TEST_P(ProcessGroup, GatherAndScatterRefuseListsOfTheWrongLength) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    const bool is_root = g->getRank() == 0;
    const auto ones = [](int count) { return Tensors(size_t(count), at::ones({2})); };
    // One too many at the root; one where none belongs elsewhere.
    TensorLists lists{ones(n + 1)};
    Tensors mine{at::ones({2})};
    EXPECT_THROW(g->gather(lists, mine), c10::Error);
    EXPECT_THROW(g->scatter(mine, lists), c10::Error);
    TensorLists none;
    TensorLists two{ones(n), ones(n)};
    EXPECT_THROW(g->gather(is_root ? none : two, mine), c10::Error);
    EXPECT_THROW(g->scatter(mine, is_root ? none : two), c10::Error);
    expect_usable(g);
  });
}

TEST_P(ProcessGroup, CoalescedCallsEndInOneWork) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    Tensors first{sample({17}, g->getRank())}, second{sample({70001}, g->getRank())}, third{at::full({5}, -1.0f)};
    if (g->getRank() == 0) third[0].fill_(4);
    g->startCoalescing(at::kCPU);
    g->allreduce(first);
    g->allreduce(second);
    g->broadcast(third);
    const WorkPtr work = g->endCoalescing(at::kCPU);
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    for (const auto& [size, got] : std::map<int64_t, at::Tensor>{{17, first[0]}, {70001, second[0]}}) {
      at::Tensor sum = sample({size}, 0);
      for (int rank = 1; rank < n; ++rank) sum = sum + sample({size}, rank);
      expect_equal(got, sum, c10::str("size ", size));
    }
    expect_equal(third[0], at::full({5}, 4.0f));
    expect_usable(g);
  });
}

TEST_P(ProcessGroup, CrossesTheDispatcherAsACustomObject) {
  on_ranks([&](const Group& g) {
    const c10::IValue boxed(g);
    ASSERT_TRUE(boxed.isCustomClass());
    EXPECT_EQ(boxed.toCustomClass<c10d::ProcessGroup>(), g);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::all_reduce", "");
    torch::jit::Stack stack{at::ones({3}), boxed, c10::make_intrusive<ReduceOp>(ReduceOp::SUM), c10::IValue()};
    op.callBoxed(stack);
    expect_equal(stack.at(0).toTensor(), at::full({3}, float(g->getSize())));
  });
}

TEST_P(ProcessGroup, PendingWorkIsDrained) {
  on_ranks([&](const Group& g) {
    std::vector<Tensors> tensors;
    for (int i = 0; i < 10; ++i) tensors.push_back({sample({1000 * i + 1}, g->getRank(), at::kFloat, i)});
    std::vector<WorkPtr> works;
    for (Tensors& each : tensors) works.push_back(g->allreduce(each));
    EXPECT_FALSE(g->hasHooks());
    g->waitForPendingWorks();
    for (const WorkPtr& work : works) EXPECT_TRUE(work->isCompleted());
    for (int i = 0; i < 10; ++i) {
      at::Tensor sum = sample({1000 * i + 1}, 0, at::kFloat, i);
      for (int rank = 1; rank < g->getSize(); ++rank) sum = sum + sample({1000 * i + 1}, rank, at::kFloat, i);
      expect_equal(tensors[i][0], sum, c10::str("work ", i));
    }
  });
}

TEST_P(ProcessGroup, SequenceNumbersAgreeAndCountCollectives) {
  on_ranks([&](const Group& g) {
    const uint64_t before = g->getSequenceNumberForGroup();
    for (int i = 0; i < 5; ++i) expect_usable(g);
    const uint64_t after = g->getSequenceNumberForGroup();
    EXPECT_EQ(after, before + 5);
    const at::Tensor mine = at::full({1}, int64_t(after), at::kLong);
    expect_equal(all_gather(mine, g), at::full({g->getSize()}, int64_t(after), at::kLong));
  });
}

TEST_P(ProcessGroup, IntegerAveragesAreCutTowardsZero) {
  on_ranks([&](const Group& g) {
    const int64_t n = g->getSize();
    for (at::ScalarType dtype : {at::kChar, at::kInt, at::kLong}) {
      // The ranks add up to 7, -7, n and -n + 1.
      at::Tensor x = at::zeros({4}, dtype);
      if (g->getRank() == 0) x = at::tensor({int64_t(7), int64_t(-7), n, 1 - n}, at::kLong).to(dtype);
      const at::Tensor expected = at::tensor({7 / n, -7 / n, int64_t(1), (1 - n) / n}, at::kLong).to(dtype);
      expect_equal(all_reduce(x, g, ReduceOp::AVG), expected, c10::toString(dtype));
      expect_equal(reduce_scatter(x.repeat({n}), g, {.op = ReduceOp::AVG}), expected, "reduce_scatter");
      all_reduce_by(g, x, ReduceOp::AVG)->wait();
      expect_equal(x, expected, c10::str("in place, ", c10::toString(dtype)));
    }
  });
}

TEST_P(ProcessGroup, ANanOfAnyRankWinsMinAndMax) {
  on_ranks([&](const Group& g) {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
        for (int who = 0; who < g->getSize(); ++who) {
          for (double other : {1.0, inf, -inf}) {
            at::Tensor x = at::full({37}, other, dtype), y = x.clone();
            if (g->getRank() == who) x.slice(0, 0, 37, 3).fill_(nan);
            at::Tensor expected = y;
            expected.slice(0, 0, 37, 3).fill_(nan);
            at::Tensor by_parts = all_gather(reduce_scatter(x, g, {.op = op}), g);
            all_reduce_by(g, x, op)->wait();
            for (const at::Tensor& got : {x, by_parts}) {
              EXPECT_TRUE(at::allclose(got, expected, 0, 0, /*equal_nan=*/true))
                  << c10::toString(dtype) << " " << to_string(op) << ", NaN on rank " << who;
            }
          }
        }
      }
    }
  });
}

TEST_P(ProcessGroup, BoolsAddUpToOr) {
  on_ranks([&](const Group& g) {
    at::Tensor x = at::zeros({g->getSize() + 1}, at::kBool);
    x[g->getRank()] = true;
    const at::Tensor expected = at::arange(g->getSize() + 1).lt(g->getSize());
    expect_equal(all_reduce(x, g), expected, "functional");
    all_reduce_by(g, x, ReduceOp::SUM)->wait();
    expect_equal(x, expected, "in place");
  });
}

TEST_P(ProcessGroup, PremulSumNeedsItsFactor) {
  on_ranks([&](const Group& g) {
    EXPECT_THROW(ReduceOp(ReduceOp::PREMUL_SUM), c10::Error);
    const at::Tensor x = sample({17}, g->getRank());
    at::Tensor sum = sample({17}, 0);
    for (int rank = 1; rank < g->getSize(); ++rank) sum = sum + sample({17}, rank);
    expect_equal(all_reduce(x, g, c10d::makePreMulSum(2.0)), sum * 2, "by a number");
    expect_equal(all_reduce(x, g, c10d::makePreMulSum(at::full({1}, 4.0f))), sum * 4, "by a tensor");
    ReduceOp without;
    without.op_ = ReduceOp::PREMUL_SUM;
    const std::string fix = "the reduction premul_sum has no factor\n  fix: make it with c10d::makePreMulSum(factor)";
    const auto text_of = [](auto call) { return error_text<c10::ValueError>(call); };
    EXPECT_THAT(text_of([&] { all_reduce(x, g, without); }), HasSubstr("[all_reduce] " + fix));
    EXPECT_THAT(text_of([&] { reduce_scatter(x, g, {.op = without}); }), HasSubstr("[reduce_scatter] " + fix));
    EXPECT_THAT(text_of([&] { all_reduce(x, g, ReduceOp::PREMUL_SUM); }), HasSubstr("[ReduceOp::PREMUL_SUM] " + fix));
    EXPECT_THAT(text_of([&] { all_reduce_(x, g, ReduceOp::PREMUL_SUM); }), HasSubstr("[ReduceOp::PREMUL_SUM] " + fix));
    EXPECT_THAT(text_of([&] { all_reduce(x, g, {.op = ReduceOp::PREMUL_SUM}); }), HasSubstr(fix));
    EXPECT_THAT(text_of([&] { reduce_scatter(x, g, {.op = ReduceOp::PREMUL_SUM}); }), HasSubstr(fix));
    EXPECT_THAT(text_of([&] { reduce_scatter_into(x, x, g, ReduceOp::PREMUL_SUM); }), HasSubstr(fix));
    EXPECT_THAT(text_of([&] { async::all_reduce(x, g, ReduceOp::PREMUL_SUM); }), HasSubstr(fix));
    at::Tensor own = x.clone();
    EXPECT_THROW(all_reduce_by(g, own, without)->wait(), c10::ValueError) << "c10d's own call";
    expect_usable(g);
  });
}

TEST_P(ProcessGroup, UnusedIsNoReduction) {
  on_ranks([&](const Group& g) {
    at::Tensor x = at::ones({3});
    EXPECT_THROW(all_reduce_by(g, x, ReduceOp::UNUSED)->wait(), c10::ValueError);
    EXPECT_THAT(error_text<c10::ValueError>([&] { all_reduce(x, g, ReduceOp::UNUSED); }),
                HasSubstr("[all_reduce] the reduction is unused\n  fix: pass one of sum, avg, product, min, max, band, "
                          "bor, bxor"));
    EXPECT_THROW(all_reduce_(x, g, ReduceOp::UNUSED), c10::ValueError);
    EXPECT_THROW(reduce_scatter(x, g, {.op = ReduceOp::UNUSED}), c10::ValueError);
    expect_equal(x, at::ones({3}), "untouched");
    expect_usable(g);
  });
}

}  // namespace
}  // namespace serried
