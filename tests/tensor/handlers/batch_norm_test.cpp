// Batch norm and group norm of DTensors, forward and backward, against the unsharded op.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/guards.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor images(int64_t batch = 5) {
  torch::manual_seed(7);
  return at::randn({batch, 3, 4}, at::kDouble) * 2 + 1;
}

// Without the global generator: ranks call it at the same time.
at::Tensor per_channel(int64_t salt) {
  return at::arange(3, at::kDouble).add(double(salt)).sin() * 0.4 + 1;
}

Placements like_channels(const Placements& of_input) {
  Placements result(of_input.size());
  for (size_t axis = 0; axis < result.size(); ++axis) {
    if (of_input[axis].is_shard(1)) result[axis] = Shard(0);
  }
  return result;
}

// Output, the gradients of input, weight and bias, and the running statistics.
Tensors run(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b, const at::Tensor& running_mean,
            const at::Tensor& running_var, bool training) {
  for (const at::Tensor& t : {x, w, b}) t.requires_grad_();
  const at::Tensor y = at::batch_norm(x, w, b, running_mean, running_var, training, 0.2, 1e-3, false);
  (y * y * y.sigmoid()).sum().backward();
  return {y.detach(), x.grad(), w.grad(), b.grad(), running_mean, running_var};
}

void expect_same_batch_norm(const at::Tensor& x, bool training) {
  const auto fresh = [&] { return Tensors{x.clone(), per_channel(1), per_channel(2), per_channel(3), per_channel(4)}; };
  Tensors plain = fresh();
  const Tensors want = run(plain[0], plain[1], plain[2], plain[3], plain[4], training);
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(x.dim(), shape.size(), false)) {
        const Tensors t = fresh();
        const Placements channels = like_channels(placements);
        const Placements whole(placements.size());
        const Tensors got = run(place(t[0], mesh, placements), place(t[1], mesh, channels), place(t[2], mesh, whole),
                                place(t[3], mesh, whole), place(t[4], mesh, channels), training);
        for (size_t i = 0; i < want.size(); ++i) {
          expect_close(full(got[i]), want[i], to_string(placements) + " result " + std::to_string(i));
        }
      }
    });
  }
}

TEST(BatchNorm, TrainingUsesTheStatisticsOfAllRanks) {
  expect_same_batch_norm(images(), /*training=*/true);
}

TEST(BatchNorm, RanksWithoutSamplesTakePart) {
  expect_same_batch_norm(images(2), /*training=*/true);
}

TEST(BatchNorm, EvaluationUsesTheRunningStatistics) {
  expect_same_batch_norm(images(), /*training=*/false);
}

TEST(BatchNorm, StatisticsFarFromZeroKeepTheirDigits) {
  const at::Tensor x = images() + 1e6;
  const at::Tensor want = at::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false);
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    const at::Tensor got = at::batch_norm(place(x, mesh, {Shard(0)}), {}, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(at::allclose(full(got), want, 1e-6, 1e-6));
  });
}

TEST(BatchNorm, LowPrecisionIsAccumulatedInFloat) {
  const at::Tensor x = images().to(at::kBFloat16);
  const at::Tensor w = per_channel(1).to(at::kFloat);
  const at::Tensor want = at::batch_norm(x, w, w, {}, {}, true, 0.1, 1e-5, false);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const at::Tensor weight = place(w, mesh, {Replicate()});
    const at::Tensor got = at::batch_norm(place(x, mesh, {Shard(0)}), weight, weight, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_EQ(got.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(full(got).to(at::kFloat), want.to(at::kFloat), 2e-2, 2e-2));
  });
}

TEST(BatchNorm, PlainRunningStatisticsAreUpdatedToo) {
  const at::Tensor x = images();
  at::Tensor want_mean = per_channel(3);
  at::Tensor want_var = per_channel(4);
  at::batch_norm(x, {}, {}, want_mean, want_var, true, 0.2, 1e-3, false);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const ImplicitReplication plain_is_replicated;
    for (const Placement& placement : {Shard(0), Shard(1)}) {
      at::Tensor mean = per_channel(3);
      at::Tensor var = per_channel(4);
      at::batch_norm(place(x, mesh, {placement}), {}, {}, mean, var, true, 0.2, 1e-3, false);
      expect_close(mean, want_mean);
      expect_close(var, want_var);
    }
  });
}

TEST(BatchNorm, AModuleTrainsOnACutBatch) {
  const at::Tensor x = images().to(at::kFloat);
  torch::nn::BatchNorm1d reference(3);
  const at::Tensor want = reference->forward(x);
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    torch::nn::BatchNorm1d module(3);
    const ImplicitReplication plain_is_replicated;
    expect_close(full(module->forward(place(x, mesh, {Shard(0)}))), want.detach());
    expect_close(module->running_var, reference->running_var);
  });
}

TEST(GroupNorm, BatchesAreCutForwardAndBackward) {
  torch::manual_seed(7);
  const at::Tensor x = at::randn({5, 6, 4}, at::kDouble);
  const at::Tensor w = at::rand({6}, at::kDouble);
  const auto run = [](const at::Tensor& input, const at::Tensor& weight) {
    input.requires_grad_();
    weight.requires_grad_();
    const at::Tensor y = at::group_norm(input, 2, weight, weight, 1e-5, false);
    (y * y.sigmoid()).sum().backward();
    return Tensors{y.detach(), input.grad(), weight.grad()};
  };
  const Tensors want = run(x.clone(), w.clone());
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(3, shape.size(), false)) {
        const Tensors got = run(place(x, mesh, placements), place(w, mesh, Placements(placements.size())));
        for (size_t i = 0; i < want.size(); ++i) expect_close(full(got[i]), want[i], to_string(placements));
      }
    });
  }
}

}  // namespace
}  // namespace serried::testing
