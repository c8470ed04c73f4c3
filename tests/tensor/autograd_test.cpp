// Gradients of ops on DTensors: as those of the plain ops, for every placement.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <ATen/autocast_mode.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::expect_close;
using testing::expect_equal;
using testing::full;
using testing::on_mesh;
using testing::place;
using testing::usual_meshes;

at::Tensor sample(at::IntArrayRef sizes, uint64_t seed = 3, at::ScalarType dtype = at::kDouble) {
  return seeded(seed, [&] { return at::randn(sizes, dtype); });
}

// A leaf that requires a gradient.
at::Tensor leaf(const at::Tensor& t) {
  return t.detach().clone().requires_grad_();
}

using Function = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

const std::vector<std::pair<std::string, Function>>& functions() {
  static const std::vector<std::pair<std::string, Function>> all = {
      {"mm", [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w); }},
      {"gelu of mm", [](const at::Tensor& x, const at::Tensor& w) { return at::gelu(x.mm(w)); }},
      {"softmax", [](const at::Tensor& x, const at::Tensor& w) { return at::softmax(x.mm(w), -1); }},
      {"mean", [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w).mean(0); }},
      {"layer_norm", [](const at::Tensor& x, const at::Tensor& w) { return at::layer_norm(x, {3}).mm(w); }},
      {"broadcast", [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w) * x.sum(1, true) + w[0]; }},
      {"views",
       [](const at::Tensor& x, const at::Tensor& w) {
         return x.t().reshape({3, 5, 1}) * w.view({3, 1, 4});
       }},
  };
  return all;
}

TEST(Autograd, GradientsAreThoseOfThePlainOps) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor x = sample({5, 3}, 3).requires_grad_();
      const at::Tensor w = sample({3, 4}, 4).requires_grad_();
      for (const auto& [name, fn] : functions()) {
        const std::vector<at::Tensor> expected = torch::autograd::grad({fn(x, w).pow(2).sum()}, {x, w});
        for (const Placements& px : all_placements(2, shape.size(), true)) {
          for (const Placements& pw : all_placements(2, 1, false)) {
            Placements on_all(shape.size(), Replicate());
            on_all.back() = pw[0];
            const at::Tensor dx = place(x.detach(), mesh, px).requires_grad_();
            const at::Tensor dw = place(w.detach(), mesh, on_all).requires_grad_();
            fn(dx, dw).pow(2).sum().backward();
            const std::string what = name + " " + to_string(px) + " with " + to_string(on_all);
            expect_close(full(dx.grad()), expected[0], what);
            expect_close(full(dw.grad()), expected[1], what);
          }
        }
      }
    });
  }
}

TEST(Autograd, SecondGradientsToo) {
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const auto second = [](const at::Tensor& x) {
        const at::Tensor y = (x.mm(x.t()).tanh() + at::softmax(x.mm(x.t()), 1)).sum();
        const at::Tensor first = torch::autograd::grad({y}, {x}, {}, true, true)[0];
        return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
      };
      const at::Tensor x = sample({5, 3}) / 2;
      const at::Tensor expected = second(leaf(x));
      for (const Placements& placements : all_placements(2, shape.size(), false)) {
        expect_close(full(second(place(x, mesh, placements).requires_grad_())), expected, to_string(placements));
      }
    });
  }
}

TEST(Autograd, GradientsAccumulateAndZeroGradWorks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = distribute_tensor(sample({5, 3}), mesh, {Shard(0)}).detach().requires_grad_();
    for (int i = 0; i < 3; ++i) (d * 2).sum().backward();
    expect_equal(full(d.grad()), at::full({5, 3}, 6, at::kDouble));
    d.mutable_grad().zero_();
    (d * 2).sum().backward();
    expect_equal(full(d.grad()), at::full({5, 3}, 2, at::kDouble));
    d.mutable_grad().reset();
    EXPECT_FALSE(d.grad().defined());
  });
}

TEST(Autograd, HooksSeeDTensors) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = distribute_tensor(sample({5, 3}), mesh, {Shard(0)}).detach().requires_grad_();
    at::Tensor y = d * 2;
    y.retain_grad();
    bool is_distributed = false;
    y.register_hook([&](const at::Tensor& grad) {
      is_distributed = is_dtensor(grad);
      return grad * 10;
    });
    y.sum().backward();
    EXPECT_TRUE(is_distributed);
    expect_equal(full(d.grad()), at::full({5, 3}, 20, at::kDouble));
    EXPECT_TRUE(is_dtensor(y.grad()));
  });
}

TEST(Autograd, DetachAndNoGradStop) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(sample({5, 3}), mesh, {Shard(0)}).detach().requires_grad_();
    EXPECT_TRUE(is_dtensor(d.detach()));
    EXPECT_FALSE((d.detach() * 2).requires_grad());
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE((d * 2).requires_grad());
    }
    EXPECT_TRUE((d * 2).requires_grad());
  });
}

TEST(Autograd, ComplexGradientsAreThoseOfThePlainOps) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor z = sample({5, 2}, 3, at::kComplexDouble);
    const auto loss = [](const at::Tensor& x) { return at::abs((x * x.conj() + x.pow(2)).sum()); };
    const at::Tensor plain = leaf(z);
    loss(plain).backward();
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      const at::Tensor d = distribute_tensor(z, mesh, {placement}).detach().requires_grad_();
      const at::Tensor value = loss(d);
      expect_close(full(value).detach(), loss(plain).detach());
      value.backward();
      expect_close(full(d.grad()), plain.grad(), to_string(placement));
    }
  });
}

TEST(Autograd, IntegersAndBoolsCompute) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor n = at::arange(15).reshape({5, 3});
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      const at::Tensor d = distribute_tensor(n, mesh, {placement});
      expect_equal(full(d * 2 + d), n * 3);
      expect_equal(full(d.sum()), n.sum());
      expect_equal(full(d > 7), n > 7);
      expect_equal(full((d > 7).any()), (n > 7).any());
      expect_equal(full(at::where(d > 7, d, -d)), at::where(n > 7, n, -n));
      expect_equal(full(d.bitwise_and(3)), n.bitwise_and(3));
    }
  });
}

TEST(Autograd, InferenceModeComputesTheSame) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = sample({5, 3});
    const at::Tensor w = sample({4, 3}, 4);
    const at::Tensor dw = distribute_tensor(w, mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor expected = at::gelu(at::linear(x, w));
    const c10::InferenceMode inference;
    const at::Tensor dx = distribute_tensor(x, mesh, {Replicate()});
    const at::Tensor y = at::gelu(at::linear(dx, dw));
    EXPECT_TRUE(y.is_inference());
    expect_close(full(y), expected);
    const at::Tensor view = dw.t();
    EXPECT_FALSE(view.is_inference()) << "a view of a normal tensor is normal";
    at::Tensor z = dx.clone();
    z.mul_(2).add_(1);
    z.view({-1}).sub_(1);
    expect_close(full(z), x * 2);
  });
}

TEST(Autograd, AutocastCastsDTensors) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = sample({6, 3}, 3, at::kFloat);
    const at::Tensor w = sample({4, 3}, 4, at::kFloat);
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor d = distribute_tensor(w, mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor y = at::linear(distribute_tensor(x, mesh), d);
    const at::Tensor expected = at::linear(x, w);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    expect_equal(full(y).detach(), expected);
    y.sum().backward();
    EXPECT_EQ(d.grad().scalar_type(), at::kFloat);
  });
}

TEST(Autograd, WhatChangedAfterItWasSavedIsFound) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(sample({5, 3}), mesh, {Shard(0)}).detach().requires_grad_();
    at::Tensor y = d * 2;
    const at::Tensor loss = (y * y).sum();
    y.mul_(3);
    EXPECT_THROW(loss.backward(), c10::Error);
    const at::Tensor part = sample({2});
    const DTensor e = DTensor::from_local(part, mesh, {Shard(0)});
    const at::Tensor factor = distribute_tensor(sample({4}), mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor product = (e * factor).sum();
    part.mul_(2);
    EXPECT_THROW(product.backward(), c10::Error) << "written through the local tensor";
  });
}

}  // namespace
}  // namespace serried
