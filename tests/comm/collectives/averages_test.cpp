// Averages lie among their inputs, whatever the sum of these: every dtype, every way through every backend.
#include <ATen/Dispatch.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/comm/backends/shm/reduce_kernels.h"
#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_equal;
using testing::OnRanks;
using Tensors = std::vector<at::Tensor>;

class Averages : public OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, Averages, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

/// Values near both ends of `dtype`, and small ones of both signs, as 64-bit integers.
at::Tensor extremes(int64_t size, int rank, at::ScalarType dtype) {
  return AT_DISPATCH_INTEGRAL_TYPES(dtype, "extremes", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    at::Tensor values = at::empty({size}, at::kLong);
    int64_t* out = values.data_ptr<int64_t>();
    for (int64_t i = 0; i < size; ++i) {
      const int64_t step = (i * 3 + rank * 5) % 7;
      const int64_t small = Limits::is_signed ? step - 3 : step;
      const int64_t large = i % 3 == 0 ? int64_t(Limits::max()) - step : int64_t(Limits::lowest()) + step;
      out[i] = i % 3 == 2 ? small : large;
    }
    return values;
  });
}

/// Their exact average, cut towards zero.
at::Tensor exact_average(int64_t size, int world_size, at::ScalarType dtype) {
  at::Tensor result = at::empty({size}, at::kLong);
  Tensors inputs;
  for (int rank = 0; rank < world_size; ++rank) inputs.push_back(extremes(size, rank, dtype));
  for (int64_t i = 0; i < size; ++i) {
    __int128 sum = 0;
    for (const at::Tensor& x : inputs) sum += x.data_ptr<int64_t>()[i];
    result.data_ptr<int64_t>()[i] = int64_t(sum / world_size);
  }
  return result.to(dtype);
}

const std::vector<at::ScalarType> kIntegers = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};

TEST_P(Averages, OfIntegersAreThoseOfTheExactSum) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    for (at::ScalarType dtype : kIntegers) {
      for (int64_t size : {1, 17, 20'000, dtype == at::kByte ? 300'007 : 70'001}) {
        const std::string what = c10::str(c10::toString(dtype), " x ", size);
        const at::Tensor x = extremes(size, g->getRank(), dtype).to(dtype);
        const at::Tensor expected = exact_average(size, n, dtype);
        expect_equal(all_reduce(x, g, ReduceOp::AVG), expected, what);
        at::Tensor y = x.clone();
        all_reduce_(y, g, ReduceOp::AVG);
        expect_equal(y, expected, what + ", in place");
        expect_equal(reduce_scatter(x.repeat({n}), g, {.op = ReduceOp::AVG}), expected, what + ", reduce_scatter");
        at::Tensor into = at::empty_like(x);
        reduce_scatter_into(into, x.repeat({n}), g, ReduceOp::AVG);
        expect_equal(into, expected, what + ", reduce_scatter_into");
      }
    }
  });
}

TEST_P(Averages, OfIntegersAreExactInEveryMethodOfC10d) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    for (at::ScalarType dtype : kIntegers) {
      for (int64_t size : {17, 20'000, dtype == at::kByte ? 300'007 : 70'001}) {
        const std::string what = c10::str(c10::toString(dtype), " x ", size);
        const at::Tensor x = extremes(size, me, dtype).to(dtype);
        const at::Tensor expected = exact_average(size, n, dtype);
        c10d::AllreduceCoalescedOptions reduction;
        reduction.reduceOp = ReduceOp::AVG;
        Tensors one{x.clone()};
        g->allreduce(one, reduction)->wait();
        expect_equal(one[0], expected, what + ", allreduce");
        Tensors two{x.clone(), x.clone().flip(0)};
        g->allreduce_coalesced(two, reduction)->wait();
        expect_equal(two[0], expected, what + ", coalesced");
        expect_equal(two[1], expected.flip(0), what + ", coalesced");
        Tensors at_root{x.clone()};
        c10d::ReduceOptions to_root;
        to_root.reduceOp = ReduceOp::AVG;
        to_root.rootRank = n - 1;
        g->reduce(at_root, to_root)->wait();
        if (me == n - 1) expect_equal(at_root[0], expected, what + ", reduce");
        c10d::ReduceScatterOptions scattered;
        scattered.reduceOp = ReduceOp::AVG;
        Tensors outputs{at::empty_like(x)};
        std::vector<Tensors> inputs{Tensors(n, x)};
        g->reduce_scatter(outputs, inputs, scattered)->wait();
        expect_equal(outputs[0], expected, what + ", reduce_scatter");
        if (is("gloo") || is("mpi")) continue;  // have no heap
        const at::Tensor block = g->getBackend(at::kCPU)->allocateTensor(size, at::TensorOptions(dtype));
        block.copy_(x);
        all_reduce_(block, g, ReduceOp::AVG);
        expect_equal(block, expected, what + ", in the heap");
      }
    }
  });
}

TEST_P(Averages, OfShortFloatsDoNotOverflow) {
  on_ranks([&](const Group& g) {
    for (int64_t size : {5, 30'000}) {
      const at::Tensor half = at::full({size}, 60'000.f, at::kHalf);
      const at::Tensor brain = at::full({size}, 3e38f, at::kBFloat16) / 4;
      expect_equal(all_reduce(half, g, ReduceOp::AVG), half, "f16");
      expect_equal(all_reduce(brain, g, ReduceOp::AVG), brain, "bf16");
      expect_equal(reduce_scatter(half.repeat({g->getSize()}), g, {.op = ReduceOp::AVG}), half, "reduce_scatter");
      Tensors tensors{half.clone()};
      c10d::AllreduceOptions options;
      options.reduceOp = ReduceOp::AVG;
      g->allreduce(tensors, options)->wait();
      expect_equal(tensors[0], half, "c10d");
    }
  });
}

TEST_P(Averages, OfShortFloatsAreRoundedOnce) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const at::Tensor x = (at::arange(1000, at::kFloat) * 0.37f + float(g->getRank())).to(dtype);
      at::Tensor sum = at::zeros({1000});
      for (int r = 0; r < g->getSize(); ++r) sum = sum + (at::arange(1000, at::kFloat) * 0.37f + float(r)).to(dtype);
      // Such sums have at most 24 bits: exact in any order.
      expect_equal(all_reduce(x, g, ReduceOp::AVG), (sum / g->getSize()).to(dtype), c10::toString(dtype));
    }
  });
}

TEST_P(Averages, HaveNoMeaningForBool) {
  on_ranks([&](const Group& g) {
    const at::Tensor x = at::ones({3}, at::kBool);
    const std::string text = c10::str(
        "op avg has no meaning for dtype bool\n  fix: bitwise ops take integers and bool; "
        "min and max take no complex numbers; avg takes no bool\n  at:  rank ",
        g->getRank(), "/", g->getSize());
    EXPECT_EQ(testing::error_text<c10::ValueError>([&] { all_reduce(x, g, ReduceOp::AVG); }), "[all_reduce] " + text);
    EXPECT_EQ(testing::error_text<c10::ValueError>([&] { all_reduce_(x, g, ReduceOp::AVG); }), "[all_reduce_] " + text);
    EXPECT_EQ(testing::error_text<c10::ValueError>([&] { reduce_scatter(x, g, {.op = ReduceOp::AVG}); }),
              "[reduce_scatter] " + text);
    EXPECT_ANY_THROW(all_reduce(at::ones({3}), g, ReduceOp::BOR));
    EXPECT_ANY_THROW(all_reduce(at::ones({3}, at::kComplexFloat), g, ReduceOp::MAX));
  });
}

TEST_P(Averages, PremultipliedIntegersKeepTheirDigits) {
  on_ranks([&](const Group& g) {
    const int64_t n = g->getSize();
    const at::Tensor x = at::full({3}, (int64_t(1) << 40) + 1 + g->getRank(), at::kLong);
    int64_t sum = 0;
    for (int64_t r = 0; r < n; ++r) sum += 3 * ((int64_t(1) << 40) + 1 + r);
    expect_equal(all_reduce(x, g, c10d::makePreMulSum(3.0)), at::full({3}, sum, at::kLong));
    int64_t halves = 0;
    for (int64_t r = 0; r < n; ++r) halves += ((int64_t(1) << 40) + 1 + r) / 2;
    expect_equal(all_reduce(x, g, c10d::makePreMulSum(0.5)), at::full({3}, halves, at::kLong));
    expect_equal(all_reduce(x, g, c10d::makePreMulSum(at::full({1}, 0.5))), at::full({3}, halves, at::kLong));
  });
}

/// What a kernel makes of `num_ranks` times the same values.
at::Tensor averaged(shm::ReduceKernel kernel, const at::Tensor& x, int num_ranks) {
  const std::vector<const void*> sources(num_ranks, x.data_ptr());
  at::Tensor result = at::empty_like(x);
  kernel(result.data_ptr(), sources.data(), num_ranks, x.numel());
  return result;
}

TEST(AverageKernels, TakeMoreRanksThanTheDtypeCounts) {
  for (const auto find : {shm::find_reduce_kernel, shm::baseline::find}) {
    for (const int num_ranks : {1, 2, 3, 127, 128, 255, 256, 257, 512}) {
      for (at::ScalarType dtype : kIntegers) {
        const at::Tensor x = extremes(1000, 1, dtype).to(dtype);
        expect_equal(averaged(find(dtype, ReduceOp::AVG), x, num_ranks), x, c10::str(dtype, " of ", num_ranks));
      }
      const at::Tensor u16 = at::full({9}, 65535, at::kInt).to(at::kUInt16);
      expect_equal(averaged(find(at::kUInt16, ReduceOp::AVG), u16, num_ranks).to(at::kInt), u16.to(at::kInt));
      const at::Tensor u32 = at::full({9}, 4294967295, at::kLong).to(at::kUInt32);
      expect_equal(averaged(find(at::kUInt32, ReduceOp::AVG), u32, num_ranks).to(at::kLong), u32.to(at::kLong));
      const at::Tensor u64 = at::full({9}, -1, at::kLong).view(at::kUInt64);
      expect_equal(averaged(find(at::kUInt64, ReduceOp::AVG), u64, num_ranks).view(at::kLong), u64.view(at::kLong));
    }
  }
}

}  // namespace
}  // namespace serried
