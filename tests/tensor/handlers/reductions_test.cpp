// Reductions of DTensors that are put together from parts, against the unsharded op.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using Op = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor sample_values() {
  torch::manual_seed(5);
  return at::randn({5, 3, 2}, at::kDouble) + 2;
}

// `op` of `x` under every placement on the usual meshes.
void expect_same(const at::Tensor& x, const Op& op, bool partial = true) {
  const at::Tensor want = op(x);
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(x.dim(), shape.size(), partial)) {
        expect_close(full(op(place(x, mesh, placements))), want, to_string(placements));
      }
    });
  }
}

TEST(Reductions, VarianceAndDeviation) {
  const at::Tensor x = sample_values();
  expect_same(x, [](const at::Tensor& t) { return t.var(); });
  expect_same(x, [](const at::Tensor& t) { return t.var(at::IntArrayRef{0, 2}, /*unbiased=*/false, true); });
  expect_same(x, [](const at::Tensor& t) { return t.std(at::IntArrayRef{0}, /*unbiased=*/true, false); });
  expect_same(x, [](const at::Tensor& t) { return at::var(t, at::IntArrayRef{0, 1}, at::Scalar(2), false); });
}

TEST(Reductions, VarianceWithMean) {
  const at::Tensor x = sample_values();
  expect_same(x, [](const at::Tensor& t) {
    const auto [variance, mean] = at::var_mean(t, at::IntArrayRef{0, 2}, at::Scalar(1), false);
    return variance + mean * 10;
  });
  expect_same(x, [](const at::Tensor& t) {
    const auto [deviation, mean] = at::std_mean(t, at::IntArrayRef{1}, at::Scalar(0), true);
    return deviation + mean * 10;
  });
}

// 0.1 has no exact mean over 7 = 3 + 3 + 1 elements. Autograd takes a deviation of exactly 0 as a constant; one of
// 1e-17 gives gradients of any size.
TEST(Reductions, EqualElementsHaveNoDeviationAndNoGradient) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(2, shape.size(), false)) {
        for (const Sizes& dims : {Sizes{0}, Sizes{1}, Sizes{0, 1}}) {
          const at::Tensor x = place(at::full({7, 7}, 0.1, at::kDouble), mesh, placements).requires_grad_();
          const at::Tensor deviation = at::std(x, at::IntArrayRef(dims), at::Scalar(1), false);
          deviation.sum().backward();
          EXPECT_EQ(full(deviation.detach()).abs().max().item<double>(), 0) << to_string(placements);
          EXPECT_EQ(full(x.grad()).abs().max().item<double>(), 0) << to_string(placements);
        }
      }
    });
  }
}

TEST(Reductions, InfiniteElementsHaveAMean) {
  const at::Tensor x = at::tensor({1.0, INFINITY, 2.0, 3.0, 4.0}, at::kDouble);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const auto [variance, mean] = at::var_mean(place(x, mesh, {Shard(0)}), at::IntArrayRef{0}, at::Scalar(1), false);
    EXPECT_TRUE(full(variance).isnan().item<bool>());
    EXPECT_EQ(full(mean).item<double>(), INFINITY);
  });
}

// A difference of large squares would leave four digits of sixteen.
TEST(Reductions, VarianceFarFromZeroKeepsItsDigits) {
  const at::Tensor x = sample_values() + 1e6;
  const at::Tensor want = x.var();
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    for (const Placements& placements : all_placements(3, 2, false)) {
      const at::Tensor got = full(place(x, mesh, placements).var());
      EXPECT_TRUE(at::allclose(got, want, 1e-9, 0)) << to_string(placements) << ": " << got << want;
    }
  });
}

TEST(Reductions, VarianceOfLowPrecisionIsAccumulatedInFloat) {
  const at::Tensor x = sample_values().to(at::kHalf);
  const at::Tensor want = x.var(at::IntArrayRef{0}, true, false);
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    const at::Tensor got = full(place(x, mesh, {Shard(0)}).var(at::IntArrayRef{0}, true, false));
    EXPECT_EQ(got.scalar_type(), at::kHalf);
    EXPECT_TRUE(at::allclose(got.to(at::kFloat), want.to(at::kFloat), 2e-3, 1e-3));
  });
}

TEST(Reductions, ComplexVariance) {
  torch::manual_seed(5);
  const at::Tensor x = at::randn({5, 3}, at::kComplexDouble);
  expect_same(
      x, [](const at::Tensor& t) { return t.var(at::IntArrayRef{0}, true, false); }, /*partial=*/false);
}

TEST(Reductions, NormsOfEveryOrder) {
  const at::Tensor x = sample_values() - 2;
  const double inf = std::numeric_limits<double>::infinity();
  for (const double order : {2.0, 3.0, 0.5, 1.0, 0.0, -1.0, inf, -inf}) {
    expect_same(x, [&](const at::Tensor& t) { return at::linalg_vector_norm(t, order); });
    expect_same(x, [&](const at::Tensor& t) { return at::linalg_vector_norm(t, order, at::IntArrayRef{0, 2}, true); });
  }
  expect_same(x, [](const at::Tensor& t) { return t.norm(); });
  expect_same(x, [](const at::Tensor& t) { return at::norm(t, 3, {0}, false); });
}

TEST(Reductions, DistanceOfTwoTensors) {
  const at::Tensor x = sample_values();
  const at::Tensor y = at::flip(x, {0});
  const at::Tensor want = at::dist(x, y, 2);
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    for (const Placements& a : all_placements(3, 2, true)) {
      expect_close(full(at::dist(place(x, mesh, a), place(y, mesh, {Shard(0), Replicate()}), 2)), want, to_string(a));
    }
  });
}

TEST(Reductions, LogSumExp) {
  at::Tensor x = sample_values() * 50;
  expect_same(
      x, [](const at::Tensor& t) { return at::logsumexp(t, {0}, false); }, /*partial=*/false);
  expect_same(
      x,
      [](const at::Tensor& t) {
        return at::logsumexp(t, {0, 1, 2}, true);
      },
      /*partial=*/false);
  x = x.clone();
  const double inf = std::numeric_limits<double>::infinity();
  x.select(1, 0).fill_(-inf);
  x[2][1][0] = inf;
  expect_same(
      x, [](const at::Tensor& t) { return at::logsumexp(t, {0}, false); }, /*partial=*/false);
}

TEST(Reductions, SmallestAndLargestTogether) {
  const at::Tensor x = sample_values();
  expect_same(x, [](const at::Tensor& t) {
    const auto [low, high] = at::aminmax(t, 0, true);
    return low + high * 100;
  });
  expect_same(x, [](const at::Tensor& t) {
    const auto [low, high] = at::aminmax(t);
    return low + high * 100;
  });
}

TEST(Reductions, ListsOfTensorsAreReducedOneByOne) {
  const at::Tensor x = sample_values();
  const at::Tensor y = at::arange(7, at::kDouble);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const std::vector<at::Tensor> parts = {place(x, mesh, {Shard(0)}), place(y, mesh, {Shard(0)})};
    const auto norms = at::_foreach_norm(parts, 2);
    expect_close(full(norms[0]), x.norm());
    expect_close(full(norms[1]), y.norm());
    const auto largest = at::_foreach_max(parts);
    expect_close(full(largest[0]), x.max());
    expect_close(full(largest[1]), y.max());
  });
}

TEST(Reductions, SumsMeansAndExtremaOfUnevenAndEmptyParts) {
  const at::Tensor x = sample_values();
  expect_same(x, [](const at::Tensor& t) { return t.sum({0}); });
  expect_same(x, [](const at::Tensor& t) { return t.mean(); });
  expect_same(x, [](const at::Tensor& t) { return t.mean({0, 2}, true); });
  expect_same(x, [](const at::Tensor& t) { return t.amax({0}); });
  expect_same(x, [](const at::Tensor& t) { return t.amin({0, 1}, true); });
  expect_same(x, [](const at::Tensor& t) { return t.prod(0); });
  expect_same(x, [](const at::Tensor& t) { return t.max(); });
  expect_same(x, [](const at::Tensor& t) { return t.argmax(0); });
  expect_same(x, [](const at::Tensor& t) { return std::get<1>(t.max(0)); });
  expect_same(x, [](const at::Tensor& t) { return t.cumsum(0); });
  expect_same(x, [](const at::Tensor& t) { return (t > 2).any(0); });
  expect_same(x, [](const at::Tensor& t) { return (t > 0).all(0); });
  expect_same(x, [](const at::Tensor& t) { return at::count_nonzero(t > 2, at::IntArrayRef{0}); });
}

TEST(Reductions, NormGradientsEqualThoseOfTheWhole) {
  const at::Tensor x = sample_values() - 2;
  const double inf = std::numeric_limits<double>::infinity();
  for (const double order : {2.0, inf}) {
    at::Tensor whole = x.clone().requires_grad_();
    at::linalg_vector_norm(whole, order).backward();
    on_mesh({4}, [&](const DeviceMesh& mesh) {
      at::Tensor parts = place(x, mesh, {Shard(0)});
      parts.requires_grad_();
      at::linalg_vector_norm(parts, order).backward();
      expect_close(full(parts.grad()), whole.grad());
    });
  }
}

}  // namespace
}  // namespace serried::testing
