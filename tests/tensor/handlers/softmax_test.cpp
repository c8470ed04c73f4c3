// Softmax along a dim that is cut: right, still cut, by two all-reduces and one in backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>

#include "serried/tensor/debug/comm_debug.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using SoftmaxFn = std::function<at::Tensor(const at::Tensor&, int64_t)>;

std::vector<SoftmaxFn> both_softmaxes() {
  return {[](const at::Tensor& x, int64_t dim) { return at::softmax(x, dim); },
          [](const at::Tensor& x, int64_t dim) { return at::log_softmax(x, dim); }};
}

// Value and gradient; the weights make every element of the gradient another number.
std::pair<at::Tensor, at::Tensor> softmax_and_gradient(const SoftmaxFn& fn, at::Tensor x, int64_t dim,
                                                       const at::Tensor& weights) {
  x = x.detach().requires_grad_();
  const at::Tensor y = fn(x, dim);
  (y * weights).sum().backward();
  return {y.detach(), x.grad()};
}

TEST(CutSoftmax, EqualsPlainUnderEveryPlacement) {
  for (const Sizes& sizes : std::vector<Sizes>{{5, 7}, {3, 2}, {2, 5, 3}}) {
    const at::Tensor x = torch::randn(sizes, at::kDouble) * 3, weights = torch::randn(sizes, at::kDouble);
    for (const SoftmaxFn& fn : both_softmaxes()) {
      const auto [want, want_grad] = softmax_and_gradient(fn, x.clone(), -1, weights);
      for (const Sizes& shape : usual_meshes()) {
        on_mesh(shape, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
          for (const Placements& placements : all_placements(x.dim(), shape.size(), true)) {
            const auto [got, grad] = softmax_and_gradient(fn, place(x, mesh, placements), -1,
                                                          place(weights, mesh, Placements(shape.size())));
            expect_close(full(got), want, to_string(placements));
            expect_close(full(grad), want_grad, "gradient " + to_string(placements));
          }
        });
      }
    }
  }
}

TEST(CutSoftmax, StaysCutByTwoAllReducesAndOneInBackward) {
  const at::Tensor x = torch::randn({6, 9}, at::kDouble);
  for (const Sizes& shape : std::vector<Sizes>{{3}, {2, 2}}) {
    for (const SoftmaxFn& fn : both_softmaxes()) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        const DTensor d = place(x, mesh, Placements(shape.size(), Shard(1)));
        const at::Tensor leaf = at::Tensor(d).detach().requires_grad_();
        CommDebugMode comm;
        const at::Tensor y = fn(leaf, 1);
        EXPECT_EQ(DTensor(y).placements(), Placements(shape.size(), Shard(1)));
        EXPECT_EQ(comm.count("all_reduce"), 2);
        y.backward(at::ones_like(y));
        EXPECT_EQ(comm.count("all_reduce"), 3);
        EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter") + comm.count("all_to_all"), 0);
        EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements(shape.size(), Shard(1)));
      });
    }
  }
}

TEST(CutSoftmax, TakesGradientsPlacedOtherwise) {
  const at::Tensor x = torch::randn({4, 5}, at::kDouble), g = torch::randn({4, 5}, at::kDouble);
  for (const SoftmaxFn& fn : both_softmaxes()) {
    const at::Tensor plain = x.clone().requires_grad_();
    fn(plain, 1).backward(g);
    on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
      for (const Placements& cut : std::vector<Placements>{{Shard(1), Replicate()}, {Shard(0), Shard(1)}}) {
        for (const Placements& of_gradient : all_placements(2, 2, true)) {
          const at::Tensor leaf = at::Tensor(place(x, mesh, cut)).detach().requires_grad_();
          fn(leaf, 1).backward(place(g, mesh, of_gradient));
          expect_close(full(leaf.grad()), plain.grad(), to_string(cut) + " and " + to_string(of_gradient));
        }
      }
    });
  }
}

TEST(CutSoftmax, RowsWithInfinitiesAndNaNAreAsPlain) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const at::Tensor x = torch::tensor({{1.0, 2.0, 3.0, 4.0, 5.0},
                                      {-inf, -inf, -inf, -inf, 1.0},
                                      {-inf, -inf, -inf, -inf, -inf},
                                      {0.0, inf, 1.0, 2.0, 3.0},
                                      {0.0, 1.0, nan, 2.0, 3.0},
                                      {1e300, -1e300, 1e300, 0.0, 1.0}},
                                     at::kDouble);
  for (const SoftmaxFn& fn : both_softmaxes()) {
    const at::Tensor want = fn(x, 1);
    for (const Sizes& shape : usual_meshes()) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        const at::Tensor got = full(fn(place(x, mesh, Placements(shape.size(), Shard(1))), 1));
        EXPECT_TRUE(at::allclose(got, want, 1e-12, 1e-12, /*equal_nan=*/true)) << got << want;
      });
    }
  }
}

TEST(CutSoftmax, HalfNumbersAreAddedUpInFloat) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = torch::randn({3, 500}).to(dtype), weights = torch::randn({3, 500}).to(dtype);
    for (const SoftmaxFn& fn : both_softmaxes()) {
      const auto [want, want_grad] = softmax_and_gradient(fn, x.clone(), 1, weights);
      on_mesh({3}, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
        const auto [got, grad] =
            softmax_and_gradient(fn, place(x, mesh, {Shard(1)}), 1, place(weights, mesh, {Replicate()}));
        EXPECT_EQ(got.scalar_type(), dtype);
        EXPECT_TRUE(at::allclose(full(got), want, 1e-2, 1e-4));
        EXPECT_TRUE(at::allclose(full(grad), want_grad, 1e-2, 2e-2));
      });
    }
  }
}

TEST(CutSoftmax, OfATransposedViewAndTwice) {
  const at::Tensor x = torch::randn({5, 4}, at::kDouble);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const at::Tensor got = at::softmax(at::Tensor(place(x, mesh, {Shard(0)})).t(), 1).log_softmax(0);
    expect_close(full(got), at::softmax(x.t(), 1).log_softmax(0));
  });
}

}  // namespace
}  // namespace serried::testing
