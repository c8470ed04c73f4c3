// Gradients of from_local, to_local, redistribute and full_tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::usual_meshes;

at::Tensor from_one(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).reshape(sizes) + 1;
}

TEST(MovesAutograd, TheGradientOfAPartIsThePartOfTheGradient) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor whole = from_one({5, 3});
      for (const Placements& placements : all_placements(2, shape.size(), false)) {
        const at::Tensor part = distribute_tensor(whole, mesh, placements).to_local().clone().requires_grad_();
        const DTensor d = DTensor::from_local(part, mesh, placements, {.shape = Sizes{5, 3}, .stride = Sizes{3, 1}});
        (d.full_tensor() * whole).sum().backward();
        expect_equal(part.grad(), distribute_tensor(whole, mesh, placements).to_local(), to_string(placements));
      }
    });
  }
}

TEST(MovesAutograd, TheGradientOfAPartialGoesToAllItsParts) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor part = from_one({4}).requires_grad_();
    (DTensor::from_local(part, mesh, {Partial()}).full_tensor() * from_one({4})).sum().backward();
    expect_equal(part.grad(), from_one({4}));
    const at::Tensor averaged = from_one({4}).requires_grad_();
    (DTensor::from_local(averaged, mesh, {Partial("avg")}).full_tensor() * from_one({4})).sum().backward();
    expect_close(averaged.grad(), from_one({4}) / 3, "each part of an average weighs a third");
  });
}

TEST(MovesAutograd, AGradientThatGoesToOneRankOnlyIsRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor part = from_one({4}).requires_grad_();
    EXPECT_THAT(error_text<c10::NotImplementedError>([&] { DTensor::from_local(part, mesh, {Partial("max")}); }),
                HasSubstr("[from_local] the gradient through P(max) does not go to all ranks alike"));
    EXPECT_NO_THROW(DTensor::from_local(part.detach(), mesh, {Partial("max")}));
  });
}

TEST(MovesAutograd, ToLocalGivesItsGradientThePlacements) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(from_one({5, 3}).requires_grad_(), mesh, {Shard(0), Shard(1)});
    (d.to_local() * 3).sum().backward();
    EXPECT_EQ(DTensor(d.grad()).placements(), (Placements{Shard(0), Shard(1)}));
    expect_equal(DTensor(d.grad()).full_tensor(), at::full({5, 3}, 3, at::kDouble));
  });
}

TEST(MovesAutograd, GradientPlacementsMayBeNamed) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    // Each rank's gradient is a summand of the whole one: Megatron's way into a column-cut layer.
    const DTensor d = distribute_tensor(from_one({4}).requires_grad_(), mesh);
    (d.to_local({.grad_placements = Placements{Partial()}}) * double(mesh.get_rank() + 1)).sum().backward();
    EXPECT_EQ(DTensor(d.grad()).placements(), (Placements{Partial()}));
    expect_equal(DTensor(d.grad()).full_tensor(), at::full({4}, 3, at::kDouble));
    const at::Tensor part = from_one({4}).requires_grad_();
    const DTensor e = DTensor::from_local(part, mesh, {Replicate()}, {.grad_placements = Placements{Replicate()}});
    e.redistribute({Shard(0)}).to_local().sum().backward();
    expect_equal(part.grad(), at::ones({4}, at::kDouble));
    EXPECT_THROW(d.to_local({.grad_placements = Placements{Shard(3)}}), c10::IndexError);
  });
}

TEST(MovesAutograd, RedistributionHandsTheGradientBack) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor whole = from_one({5, 3});
      for (const Placements& from : all_placements(2, shape.size(), true)) {
        for (const Placements& to : all_placements(2, shape.size(), false)) {
          const at::Tensor d = testing::place(whole, mesh, from).detach().requires_grad_();
          DTensor(d).redistribute(to).to_local().mul(2).sum().backward();
          const DTensor grad(d.grad());
          if (from != to) {
            for (size_t axis = 0; axis < from.size(); ++axis) {
              EXPECT_EQ(grad.placements()[axis], from[axis].is_partial() ? Replicate() : from[axis]);
            }
          }
          expect_equal(grad.full_tensor(), at::full({5, 3}, 2, at::kDouble), to_string(from) + " -> " + to_string(to));
        }
      }
    });
  }
}

TEST(MovesAutograd, EachDirectionHasItsDtype) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor((from_one({4}) / 7).requires_grad_(), mesh, {Shard(0)});
    const DTensor half =
        DTensor(d).redistribute({Replicate()}, {.forward_dtype = at::kBFloat16, .backward_dtype = at::kFloat});
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    (half.to_local() * 2).sum().backward();
    EXPECT_EQ(d.grad().scalar_type(), at::kDouble);
    expect_equal(DTensor(d.grad()).full_tensor(), at::full({4}, 2, at::kDouble));
  });
}

TEST(MovesAutograd, AnotherMeshHandsTheGradientBack) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh line = init_device_mesh("cpu", {4}, {"all"}, {.group = group});
    const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    const at::Tensor d = distribute_tensor(from_one({5, 6}).requires_grad_(), line, {Shard(0)});
    (DTensor(d).redistribute(grid, {Shard(1), Replicate()}).full_tensor() * from_one({5, 6})).sum().backward();
    EXPECT_TRUE(DTensor(d.grad()).device_mesh() == line);
    expect_equal(DTensor(d.grad()).full_tensor(), from_one({5, 6}));
  });
}

TEST(MovesAutograd, AllMovesAreTwiceDifferentiable) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = from_one({5, 3}) / 10;
    const Placements from = {Shard(0), Replicate()};
    const at::Tensor part = distribute_tensor(whole, mesh, from).to_local().clone().requires_grad_();
    const DTensor d = DTensor::from_local(part, mesh, from, {.shape = Sizes{5, 3}, .stride = Sizes{3, 1}});
    const at::Tensor full = d.redistribute({Shard(1), Shard(0)}).full_tensor();
    const at::Tensor first = torch::autograd::grad({full.pow(3).sum()}, {part}, {}, true, true)[0];
    expect_close(first.detach(), 3 * part.detach().pow(2));
    const at::Tensor second = torch::autograd::grad({first.sum()}, {part})[0];
    expect_close(second, 6 * part.detach());
  });
}

TEST(MovesAutograd, WritingToAPartThatAutogradFollowsRaises) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(from_one({4}).requires_grad_(), mesh, {Shard(0)});
    at::Tensor part = d.to_local();
    EXPECT_THROW(part.mul_(2), c10::Error);
    at::NoGradGuard no_grad;
    EXPECT_NO_THROW(d.to_local().mul_(2));
    expect_equal(d.full_tensor(), from_one({4}) * 2);
  });
}

TEST(MovesAutograd, NothingIsRecordedWithoutNeed) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(from_one({4}).requires_grad_(), mesh, {Shard(0)});
    at::NoGradGuard no_grad;
    EXPECT_FALSE(d.to_local().requires_grad());
    EXPECT_FALSE(d.redistribute({Replicate()}).requires_grad());
    EXPECT_FALSE(d.full_tensor().requires_grad());
    EXPECT_FALSE(DTensor::from_local(from_one({4}), mesh).requires_grad());
  });
}

TEST(MovesAutograd, WorksUnderInferenceMode) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor normal = distribute_tensor(from_one({5}).requires_grad_(), mesh, {Shard(0)});
    const c10::InferenceMode inference;
    expect_equal(normal.full_tensor(), from_one({5}));
    const DTensor d = distribute_tensor(from_one({5}), mesh, {Shard(0)});
    EXPECT_TRUE(d.is_inference());
    expect_equal(d.redistribute({Replicate()}).to_local(), from_one({5}));
    expect_equal(DTensor::from_local(from_one({3}), mesh).full_tensor(), from_one({3}));
  });
}

}  // namespace
}  // namespace serried
