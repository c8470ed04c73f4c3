// Every backend reduces alike: dtypes, reductions and sizes through c10d's own methods, against plain ATen in rank
// order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_close;
using testing::expect_equal;
using testing::kAllDtypes;
using testing::sample;
using testing::samples;
using testing::sibling;
using Tensors = std::vector<at::Tensor>;
using RedOpType = ReduceOp::RedOpType;

class ConformanceReductions : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceReductions, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

bool is_integer(at::ScalarType dtype) {
  return at::isIntegralType(dtype, /*includeBool=*/true);
}

// What the reduction means for the dtype; null where it means nothing, and every backend refuses.
std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> step_of(RedOpType op, at::ScalarType dtype) {
  using T = const at::Tensor&;
  switch (op) {
    case ReduceOp::AVG:
      if (dtype == at::kBool) return nullptr;
      return [](T a, T b) { return a + b; };
    case ReduceOp::SUM:
      if (dtype == at::kBool) return [](T a, T b) { return at::logical_or(a, b); };
      return [](T a, T b) { return a + b; };
    case ReduceOp::PRODUCT: return [](T a, T b) { return a * b; };
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      if (at::isComplexType(dtype)) return nullptr;
      if (op == ReduceOp::MIN) return [](T a, T b) { return at::minimum(a, b); };
      return [](T a, T b) { return at::maximum(a, b); };
    default:
      if (!is_integer(dtype)) return nullptr;
      if (op == ReduceOp::BAND) return [](T a, T b) { return at::bitwise_and(a, b); };
      if (op == ReduceOp::BOR) return [](T a, T b) { return at::bitwise_or(a, b); };
      return [](T a, T b) { return at::bitwise_xor(a, b); };
  }
}

std::optional<at::Tensor> expected(RedOpType op, const Tensors& xs) {
  const auto step = step_of(op, xs[0].scalar_type());
  if (!step) return std::nullopt;
  at::Tensor result = xs[0].clone();
  for (size_t i = 1; i < xs.size(); ++i) result = step(result, xs[i]);
  if (op != ReduceOp::AVG) return result;
  if (is_integer(xs[0].scalar_type())) return result.div(int64_t(xs.size()), "trunc");
  return result / int64_t(xs.size());
}

const std::vector<RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                     ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};

// What a backend does not have although it means something.
bool refuses(const std::string& backend, RedOpType op, at::ScalarType dtype) {
  if (backend != "gloo") return false;
  if (dtype == at::kShort) return op != ReduceOp::AVG;
  return at::isComplexType(dtype) && op == ReduceOp::PRODUCT;
}

std::string label(RedOpType op, at::ScalarType dtype, int64_t size) {
  return c10::str(to_string(op), " of ", c10::toString(dtype), " x ", size);
}

void expect_reduced(const at::Tensor& actual, const at::Tensor& value, RedOpType op, const std::string& what) {
  if (op == ReduceOp::AVG) return expect_close(actual, value, what);
  expect_equal(actual, value, what);
}

void all_reduce_now(const Group& g, at::Tensor& x, const ReduceOp& op) {
  Tensors tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  g->allreduce(tensors, options)->wait();
}

TEST_P(ConformanceReductions, AllReduceEveryDtypeOpAndSize) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : kAllDtypes) {
      for (RedOpType op : kOps) {
        if (!step_of(op, dtype) || refuses(GetParam().backend, op, dtype)) continue;  // refused below
        for (int64_t size : {0, 1, 17, 1000}) {
          const Tensors xs = samples({size}, g->getSize(), dtype);
          at::Tensor x = xs[g->getRank()].clone();
          all_reduce_now(g, x, op);
          expect_reduced(x, *expected(op, xs), op, label(op, dtype, size));
        }
      }
    }
  });
}

// The other half of the table, the same for every world size.
class ConformanceReductionRefusals : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceReductionRefusals, ::testing::ValuesIn(testing::settings({2})),
                         testing::name_of);

TEST_P(ConformanceReductionRefusals, WhatHasNoMeaningOrNoKernelIsRefusedOnEveryRank) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : kAllDtypes) {
      for (RedOpType op : kOps) {
        if (step_of(op, dtype) && !refuses(GetParam().backend, op, dtype)) continue;
        // Gloo finds out on its own thread, which ends the group: it gets one to spend. Ours stay usable.
        const Group spent = is("gloo") ? sibling(g, "gloo") : g;
        at::Tensor x = sample({17}, g->getRank(), dtype);
        EXPECT_ANY_THROW(all_reduce_now(spent, x, op)) << label(op, dtype, 17);
      }
    }
    at::Tensor x = sample({17}, g->getRank());
    all_reduce_now(g, x, ReduceOp::SUM);
    expect_equal(x, *expected(ReduceOp::SUM, samples({17}, g->getSize())));
  });
}

TEST_P(ConformanceReductions, AllReduceSizesAcrossStages) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      for (int64_t size : {70001, 1300000}) {
        if (size > 100000 && dtype != at::kFloat) continue;
        const Tensors xs = samples({size}, g->getSize(), dtype);
        for (RedOpType op : {ReduceOp::SUM, ReduceOp::MAX}) {
          at::Tensor x = xs[g->getRank()].clone();
          all_reduce_now(g, x, op);
          expect_reduced(x, *expected(op, xs), op, label(op, dtype, size));
        }
      }
    }
  });
}

// Values whose sum depends on the order of addition.
at::Tensor noise(int64_t size, int rank, at::ScalarType dtype = at::kFloat) {
  at::Generator generator = at::detail::createCPUGenerator(1234 + rank);
  return at::randn({size}, generator, at::kFloat).mul_(1000).to(dtype);
}

TEST_P(ConformanceReductions, SumsAreBitwiseEqualOnAllRanksAndFromRunToRun) {
  on_ranks([&](const Group& g) {
    for (int64_t size : {3, 1000, 70001, 1300000}) {
      at::Tensor first = noise(size, g->getRank()), second = first.clone();
      at::Tensor in_order = noise(size, 0);
      for (int rank = 1; rank < g->getSize(); ++rank) in_order = in_order + noise(size, rank);
      all_reduce_now(g, first, ReduceOp::SUM);
      all_reduce_now(g, second, ReduceOp::SUM);
      expect_equal(second, first, "again");
      // Gloo and MPI add in an order of their own; ours is the order of the ranks.
      if (is("gloo") || is("mpi")) {
        EXPECT_TRUE(at::allclose(first, in_order, 1e-5, 1e-2)) << size;
      } else {
        expect_equal(first, in_order, c10::str("in rank order, ", size));
      }
      at::Tensor from_rank_0 = first.clone();
      Tensors tensors{from_rank_0};
      g->broadcast(tensors)->wait();
      expect_equal(first, from_rank_0, c10::str("rank ", g->getRank(), " and rank 0"));
    }
  });
}

TEST_P(ConformanceReductions, ShortFloatsAreAddedInFloat) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      at::Tensor sum = noise(1000, 0, dtype).to(at::kFloat);
      for (int rank = 1; rank < g->getSize(); ++rank) sum = sum + noise(1000, rank, dtype).to(at::kFloat);
      at::Tensor x = noise(1000, g->getRank(), dtype);
      all_reduce_now(g, x, ReduceOp::SUM);
      // Gloo and MPI round after each addition.
      if (is("gloo") || is("mpi")) {
        EXPECT_TRUE(at::allclose(x.to(at::kFloat), sum, 3e-2, 50.0));
      } else {
        expect_equal(x, sum.to(dtype), c10::toString(dtype));
      }
    }
  });
}

TEST_P(ConformanceReductions, PremulSumScalesBeforeItAdds) {
  on_ranks([&](const Group& g) {
    const Tensors xs = samples({17}, g->getSize());
    at::Tensor x = xs[g->getRank()].clone();
    if (is("gloo")) {
      const Group spent = sibling(g, "gloo");
      EXPECT_ANY_THROW(all_reduce_now(spent, x, c10d::makePreMulSum(2.0)));
      return;
    }
    const at::Tensor value = *expected(ReduceOp::SUM, xs) * 2;
    all_reduce_now(g, x, c10d::makePreMulSum(2.0));
    expect_equal(x, value, "by a number");
    x = xs[g->getRank()].clone();
    all_reduce_now(g, x, c10d::makePreMulSum(at::full({1}, 2.0f)));
    expect_equal(x, value, "by a tensor");
    expect_equal(all_reduce(xs[g->getRank()], g, c10d::makePreMulSum(2.0)), value, "functional");
  });
}

TEST_P(ConformanceReductions, ReduceGivesTheRootTheResult) {
  on_ranks([&](const Group& g) {
    for (int root = 0; root < g->getSize(); ++root) {
      for (RedOpType op : {ReduceOp::SUM, ReduceOp::MIN, ReduceOp::BXOR}) {
        for (int64_t size : {0, 17, 70001}) {
          const at::ScalarType dtype = op == ReduceOp::BXOR ? at::kLong : at::kFloat;
          const Tensors xs = samples({size}, g->getSize(), dtype);
          Tensors tensors{xs[g->getRank()].clone()};
          c10d::ReduceOptions options;
          options.reduceOp = op;
          options.rootRank = root;
          g->reduce(tensors, options)->wait();
          if (g->getRank() == root) expect_equal(tensors[0], *expected(op, xs), label(op, dtype, size));
        }
      }
    }
  });
}

TEST_P(ConformanceReductions, CoalescedTensorsAreReducedEach) {
  on_ranks([&](const Group& g) {
    for (int64_t size : {3, 70001}) {
      Tensors tensors, values;
      for (int64_t i = 0; i < 5; ++i) {
        const Tensors xs = samples({size + i, 2}, g->getSize(), at::kFloat, i);
        tensors.push_back(xs[g->getRank()].clone());
        values.push_back(*expected(ReduceOp::MAX, xs));
      }
      c10d::AllreduceCoalescedOptions options;
      options.reduceOp = ReduceOp::MAX;
      g->allreduce_coalesced(tensors, options)->wait();
      for (size_t i = 0; i < tensors.size(); ++i) expect_equal(tensors[i], values[i], c10::str("tensor ", i));
    }
  });
}

TEST_P(ConformanceReductions, ReduceScatterInEveryForm) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    for (RedOpType op : {ReduceOp::SUM, ReduceOp::MAX}) {
      for (int64_t size : {0, 1, 17, 30011}) {
        const Tensors xs = samples({n, size}, n, at::kFloat);
        const at::Tensor value = expected(op, xs)->select(0, g->getRank());
        const std::string what = label(op, at::kFloat, size);
        c10d::ReduceScatterOptions options;
        options.reduceOp = op;

        Tensors outputs{at::full({size}, -7.0f)};
        std::vector<Tensors> inputs{xs[g->getRank()].clone().unbind(0)};
        g->reduce_scatter(outputs, inputs, options)->wait();
        expect_equal(outputs[0], value, what + ", list");

        at::Tensor output = at::full({size}, -7.0f), input = xs[g->getRank()].clone();
        g->reduce_scatter_single(output, input, options)->wait();
        expect_equal(output, value, what + ", flat");

        Tensors many_out{at::full({size}, -7.0f), at::full({size}, -7.0f)}, many_in{input, input * 2};
        g->reduce_scatter_single_coalesced(many_out, many_in, options)->wait();
        expect_equal(many_out[0], value, what + ", coalesced");
        expect_equal(many_out[1], value * 2, what + ", coalesced");
      }
    }
  });
}

TEST_P(ConformanceReductions, SparseTensorsAreAddedUp) {
  on_ranks([&](const Group& g) {
    at::Tensor dense = at::zeros({6, 3});
    at::Tensor mine;
    for (int rank = 0; rank < g->getSize(); ++rank) {
      at::Tensor rows = at::zeros({6, 3});
      rows[rank] = rank + 1;
      rows[5] = 10;
      dense = dense + rows;
      if (rank == g->getRank()) mine = rows.to_sparse(1).coalesce();
    }
    Tensors tensors{mine};
    g->allreduce(tensors)->wait();
    expect_equal(tensors[0].to_dense(), dense);
  });
}

}  // namespace
}  // namespace serried
