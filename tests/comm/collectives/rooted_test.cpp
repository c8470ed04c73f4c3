// reduce, gather and scatter: one rank gets, or gives, and shapes may differ between ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"
#include "tests/support/on_ranks.h"
#include "tests/support/plain_collectives.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::sample;
using testing::samples;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

class Rooted : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, Rooted, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

// Shapes that differ in every dim: small, empty, without dims, and too large for a slot.
const std::vector<std::vector<Sizes>> kShapes = {
    {{2, 3}, {4}, {3, 1, 2}, {5, 2}}, {{0, 3}, {2, 2}, {}, {0}},      {{}, {}, {}, {}},
    {{0}, {0}, {0, 5}, {2, 0}},       {{3}, {70001}, {1}, {40, 500}},
};

Tensors parts_of(const std::vector<Sizes>& shapes, int world_size, at::ScalarType dtype) {
  Tensors parts;
  for (int rank = 0; rank < world_size; ++rank) parts.push_back(sample(shapes[size_t(rank)], rank, dtype));
  return parts;
}

// The same values, not contiguous.
at::Tensor spread(const at::Tensor& x) {
  return at::stack({x, x}, -1).select(-1, 1);
}

Tensors spread_all(const Tensors& xs) {
  Tensors all;
  for (const at::Tensor& x : xs) all.push_back(spread(x));
  return all;
}

void expect_gathered(const Tensors& actual, const Tensors& parts, bool is_root, const std::string& what) {
  ASSERT_EQ(actual.size(), parts.size()) << what;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    expect_equal(actual[rank], is_root ? parts[rank] : at::zeros_like(parts[rank]), what);
  }
}

TEST_P(Rooted, GatherGivesEveryRanksTensorToOneRank) {
  on_ranks([](const Group& g) {
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const Tensors parts = parts_of(kShapes[i], g->getSize(), dtype);
        const int dst = int(i) % g->getSize();
        const at::Tensor& mine = parts[size_t(g->getRank())];
        const std::string what = c10::str("shapes ", i, " of ", dtype, " to ", dst);
        expect_gathered(gather(mine, g, {.dst = dst}), parts, g->getRank() == dst, what);
        expect_gathered(gather(spread(mine), g, {.dst = dst}), parts, g->getRank() == dst, what + ", not contiguous");
        expect_gathered(async::gather(mine, g, {.dst = dst}).wait(), parts, g->getRank() == dst, what + ", started");
      }
    }
  });
}

TEST_P(Rooted, ScatterGivesEachRankItsTensor) {
  on_ranks([](const Group& g) {
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const Tensors parts = parts_of(kShapes[i], g->getSize(), dtype);
        const int src = int(i) % g->getSize();
        const bool sends = g->getRank() == src;
        const at::Tensor& mine = parts[size_t(g->getRank())];
        const std::string what = c10::str("shapes ", i, " of ", dtype, " from ", src);
        const at::Tensor got = scatter(sends ? parts : Tensors(), g, {.src = src});
        expect_equal(got, mine, what);
        EXPECT_TRUE(got.is_contiguous() && !got.requires_grad()) << what;
        expect_equal(scatter(sends ? spread_all(parts) : Tensors(), g, {.src = src}), mine, what + ", not contiguous");
        expect_equal(async::scatter(sends ? parts : Tensors(), g, {.src = src}).wait(), mine, what + ", started");
      }
    }
  });
}

TEST_P(Rooted, ReduceGivesEveryReductionToOneRank) {
  on_ranks([](const Group& g) {
    const auto compare = [&](const Tensors& xs, ReduceOp::RedOpType op) {
      const int dst = int(op) % g->getSize();
      const at::Tensor& mine = xs[size_t(g->getRank())];
      const at::Tensor expected = g->getRank() == dst ? testing::reduced(op, xs) : at::zeros_like(mine);
      const std::string what = c10::str(to_string(op), " of ", mine.scalar_type());
      expect_close(reduce(mine, g, {.dst = dst, .op = op}), expected, what);
      expect_close(reduce(spread(mine), g, {.dst = dst, .op = op}), expected, what + ", not contiguous");
      expect_close(async::reduce(mine, g, {.dst = dst, .op = op}).wait(), expected, what + ", started");
    };
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
                          ReduceOp::BOR, ReduceOp::BXOR}) {
      compare(samples({4, 3}, g->getSize(), at::kInt), op);
    }
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble,
                             at::kByte, at::kLong}) {
      for (const Sizes& sizes : {Sizes{5, 3}, Sizes{}, Sizes{0, 2}, Sizes{70001}}) {
        compare(samples(sizes, g->getSize(), dtype), ReduceOp::SUM);
        compare(samples(sizes, g->getSize(), dtype), ReduceOp::AVG);
      }
    }
    compare(samples({3}, g->getSize(), at::kBool), ReduceOp::BOR);
  });
}

TEST_P(Rooted, ReduceMultipliesByAFactorFirst) {
  on_ranks([](const Group& g) {
    const Tensors xs = samples({3}, g->getSize(), at::kDouble);
    const at::Tensor y = reduce(xs[size_t(g->getRank())], g, {.op = c10d::makePreMulSum(0.5)});
    expect_close(y, g->getRank() == 0 ? testing::sum_of(xs) / 2 : at::zeros({3}, at::kDouble));
  });
}

TEST_P(Rooted, ScatterSendsGradientsBackToTheList) {
  on_ranks([](const Group& g) {
    for (const bool started : {false, true}) {
      for (int src = 0; src < g->getSize(); ++src) {
        Tensors leaves;
        for (at::Tensor& part : parts_of(kShapes[1], g->getSize(), at::kDouble))
          leaves.push_back(part.requires_grad_());
        const Tensors list = g->getRank() == src ? leaves : Tensors();
        const at::Tensor y = started ? async::scatter(list, g, {.src = src}).wait() : scatter(list, g, {.src = src});
        EXPECT_TRUE(y.requires_grad());
        (y.pow(3) * (g->getRank() + 2)).sum().backward();
        for (size_t rank = 0; rank < list.size(); ++rank) {
          expect_close(list[rank].grad(), 3 * leaves[rank].detach().pow(2) * (double(rank) + 2));
        }
      }
    }
  });
}

TEST_P(Rooted, OnlyTheResultOfTheRootNeedsToEnterTheLoss) {
  on_ranks([](const Group& g) {
    const int n = g->getSize(), dst = n - 1;
    for (const bool started : {false, true}) {
      const at::Tensor x = sample({4}, g->getRank(), at::kDouble).requires_grad_();
      const at::Tensor sum = started ? async::reduce(x, g, {.dst = dst}).wait() : reduce(x, g, {.dst = dst});
      (g->getRank() == dst ? sum.pow(2).sum() : 0 * sum.sum()).backward();
      expect_close(x.grad(), 2 * testing::sum_of(samples({4}, n, at::kDouble)));
      const at::Tensor y = sample({g->getRank() + 1}, g->getRank(), at::kDouble).requires_grad_();
      const Tensors parts = started ? async::gather(y, g, {.dst = dst}).wait() : gather(y, g, {.dst = dst});
      (g->getRank() == dst ? at::cat(parts).pow(2).sum() : 0 * parts[0].sum()).backward();
      expect_close(y.grad(), 2 * y.detach());
    }
  });
}

TEST_P(Rooted, RanksWithoutAGradientOfTheirOwnTakePartInThatOfOthers) {
  on_ranks([](const Group& g) {
    const int last = g->getSize() - 1;
    const at::Tensor x = sample({3}, g->getRank(), at::kDouble).requires_grad_(g->getRank() == last);
    const Tensors parts = gather(x, g);
    EXPECT_TRUE(parts[0].requires_grad());
    at::cat(parts).pow(2).sum().backward();
    if (g->getRank() == last) expect_close(x.grad(), 2 * x.detach());
    EXPECT_EQ(x.grad().defined(), g->getRank() == last);
    EXPECT_EQ(x.requires_grad(), g->getRank() == last);
  });
}

TEST_P(Rooted, NobodyHasAGradientWhereNobodyNeedsOne) {
  on_ranks([](const Group& g) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    const Tensors list = g->getRank() == 0 ? Tensors(size_t(g->getSize()), x) : Tensors();
    EXPECT_FALSE(scatter(g->getRank() == 0 ? Tensors(size_t(g->getSize()), x.detach()) : Tensors(), g).requires_grad());
    EXPECT_FALSE(gather(x.detach(), g)[0].requires_grad());
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(reduce(x, g).requires_grad());
      EXPECT_FALSE(gather(x, g)[0].requires_grad());
      EXPECT_FALSE(scatter(list, g).requires_grad());
    }
    const c10::InferenceMode inference;
    expect_equal(reduce(at::ones({2}), g), at::full({2}, g->getRank() == 0 ? double(g->getSize()) : 0., at::kFloat));
    EXPECT_EQ(gather(at::ones({2}), g).size(), size_t(g->getSize()));
    expect_equal(scatter(g->getRank() == 0 ? Tensors(size_t(g->getSize()), at::ones({2})) : Tensors(), g),
                 at::ones({2}));
  });
}

TEST_P(Rooted, PartsOfAGatherAreWrittenOneByOne) {
  on_ranks([](const Group& g) {
    for (const bool grad : {false, true}) {
      const at::Tensor x = at::full({2}, double(g->getRank())).requires_grad_(grad);
      const Tensors parts = gather(x, g);
      if (g->getRank() == 0) {
        for (const at::Tensor& part : parts) part.mul_(3).add_(1);
        for (size_t rank = 0; rank < parts.size(); ++rank)
          expect_equal(parts[rank].detach(), at::full({2}, 3. * double(rank) + 1));
      } else {
        EXPECT_EQ(parts[0].storage().nbytes(), parts[0].itemsize());  // however many zeros there are
        EXPECT_THROW(parts[0].add_(1), c10::Error);
      }
      if (!grad) continue;
      at::cat(parts).sum().backward();
      expect_equal(x.grad(), at::full({2}, 3.));
    }
  });
}

TEST_P(Rooted, StartedOnesAreWaitedForInAnyOrder) {
  on_ranks([](const Group& g) {
    const int n = g->getSize();
    const at::Tensor x = sample({6}, g->getRank(), at::kDouble);
    const Pending sum = async::reduce(x, g);
    const PendingTensors parts = async::gather(x, g, {.dst = n - 1});
    const Pending mine = async::scatter(g->getRank() == 0 ? x.tensor_split(n) : Tensors(), g);
    const Pending first = parts.then([](const Tensors& all) { return all[0] * 2; });
    expect_equal(mine.wait(), sample({6}, 0, at::kDouble).tensor_split(n)[size_t(g->getRank())]);
    expect_equal(first.wait(), g->getRank() == n - 1 ? sample({6}, 0, at::kDouble) * 2 : at::zeros({6}, at::kDouble));
    expect_gathered(parts.wait(), samples({6}, n, at::kDouble), g->getRank() == n - 1, "gather");
    EXPECT_TRUE(parts.ready() && parts.wait()[0].is_same(parts.wait()[0]));
    expect_equal(sum.wait(),
                 g->getRank() == 0 ? testing::sum_of(samples({6}, n, at::kDouble)) : at::zeros({6}, at::kDouble));
  });
}

TEST_P(Rooted, WhatIsOnItsWayMayNotBeWritten) {
  on_ranks([](const Group& g) {
    at::Tensor x = at::ones({4});
    const auto text = [&](const char* name) {
      return c10::str("[", name, "] f32[4] was written while it was on its way to other ranks\n",
                      "  fix: write to it after wait(), or pass x.clone()\n  at:  rank ", g->getRank(), "/",
                      g->getSize());
    };
    const Pending sum = async::reduce(x, g);
    const PendingTensors parts = async::gather(x, g);
    x.add_(1);
    EXPECT_EQ(error_text<c10::ValueError>([&] { sum.wait(); }), text("reduce"));
    EXPECT_EQ(error_text<c10::ValueError>([&] { parts.wait(); }), text("gather"));
    // A scatter sends a copy.
    const Pending mine = async::scatter(g->getRank() == 0 ? Tensors(size_t(g->getSize()), x) : Tensors(), g);
    x.zero_();
    expect_equal(mine.wait(), at::full({4}, 2., at::kFloat));
    barrier(g);
  });
}

TEST(RootedMeta, ShapesComeWithoutData) {
  run_ranks(3, [](const Group& g) {
    const at::Tensor x = at::empty({2, 3}, at::kMeta);
    const at::Tensor sum = reduce(x, g, {.dst = 1});
    EXPECT_TRUE(sum.is_meta() && sum.sizes() == x.sizes());
    const Tensors parts = gather(x, g, {.dst = 1});
    ASSERT_EQ(parts.size(), 3u);
    EXPECT_TRUE(parts[2].is_meta() && parts[2].sizes() == x.sizes());
    const at::Tensor mine = scatter(g->getRank() == 1 ? x.tensor_split(3, 1) : Tensors(), g, {.src = 1});
    EXPECT_TRUE(mine.is_meta());
    EXPECT_EQ(mine.sizes(), (Sizes{2, 1}));
  });
}

TEST(RootedFake, GivesWhatThisRankAloneCanKnow) {
  const at::Tensor x = at::arange(4, at::kFloat);
  for (const bool is_root : {true, false}) {
    const Group g = testing::fake_group(is_root ? 1 : 2, 4);
    expect_equal(reduce(x, g, {.dst = 1}), is_root ? x : at::zeros({4}));
    expect_gathered(gather(x, g, {.dst = 1}), Tensors(4, x), is_root, "fake");
  }
  expect_equal(scatter(x.tensor_split(4), testing::fake_group(1, 4), {.src = 1}), at::ones({1}));
  EXPECT_EQ(error_text<c10::ValueError>([&] { scatter({}, testing::fake_group(2, 4), {.src = 1}); }),
            "[scatter] the backend moves nothing, so that rank 2 cannot learn what rank 1 would send\n"
            "  fix: scatter from this rank, or use a backend that communicates");
}

}  // namespace
}  // namespace serried
