// Losses of DTensors, forward and backward, against the unsharded op.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using Loss = std::function<at::Tensor(const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight)>;

struct Sample {
  at::Tensor scores, target, weight;
};

// The loss and the gradient of the scores, under every placement of the scores; the target lies like their batch.
void expect_same(const Sample& sample, const Loss& loss) {
  const auto run = [&](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    scores.requires_grad_();
    const at::Tensor value = loss(scores, target, weight);
    (value * value).sum().backward();
    return std::pair(value.detach(), scores.grad());
  };
  const auto [want, want_grad] = run(sample.scores.clone(), sample.target, sample.weight);
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(sample.scores.dim(), shape.size(), true)) {
        Placements of_target(placements.size());
        for (size_t axis = 0; axis < placements.size(); ++axis) {
          if (placements[axis].is_shard(0)) of_target[axis] = Shard(0);
        }
        const at::Tensor weight =
            sample.weight.defined() ? place(sample.weight, mesh, Placements(placements.size())) : at::Tensor();
        const auto [got, grad] =
            run(place(sample.scores, mesh, placements), place(sample.target, mesh, of_target), weight);
        expect_close(full(got), want, to_string(placements));
        expect_close(full(grad), want_grad, "gradient " + to_string(placements));
      }
    });
  }
}

Sample classes(int64_t batch) {
  torch::manual_seed(11);
  return {at::randn({batch, 4}, at::kDouble), at::randint(0, 4, {batch}, at::kLong), at::rand({4}, at::kDouble) + 0.1};
}

TEST(CrossEntropy, MeansCountWhatIsNotIgnored) {
  Sample sample = classes(5);
  sample.target[1] = 3;
  expect_same(sample, [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor&) {
    return at::cross_entropy_loss(scores, target, {}, at::Reduction::Mean, /*ignore_index=*/3);
  });
}

TEST(CrossEntropy, MeansAreWeighedByClass) {
  expect_same(classes(6), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::cross_entropy_loss(scores, target, weight);
  });
}

TEST(CrossEntropy, RanksWithoutSamplesAddNothing) {
  expect_same(classes(2), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::cross_entropy_loss(scores, target, weight);
  });
}

TEST(CrossEntropy, SumsAndSingleLosses) {
  for (const int64_t reduction : {at::Reduction::Sum, at::Reduction::None}) {
    expect_same(classes(5), [&](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
      return at::cross_entropy_loss(scores, target, weight, reduction);
    });
  }
}

TEST(CrossEntropy, LabelsMayBeSmoothed) {
  expect_same(classes(5), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::cross_entropy_loss(scores, target, weight, at::Reduction::Mean, -100, 0.1);
  });
}

TEST(CrossEntropy, ImagesOfClasses) {
  torch::manual_seed(11);
  const Sample sample = {at::randn({3, 4, 2, 3}, at::kDouble), at::randint(0, 4, {3, 2, 3}, at::kLong),
                         at::rand({4}, at::kDouble) + 0.1};
  expect_same(sample, [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::cross_entropy_loss(scores, target, weight, at::Reduction::Mean, /*ignore_index=*/0);
  });
}

TEST(CrossEntropy, NothingLeftIsNotANumber) {
  const Sample sample = classes(4);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const at::Tensor target = place(at::zeros({4}, at::kLong), mesh, {Shard(0)});
    const at::Tensor loss =
        at::cross_entropy_loss(place(sample.scores, mesh, {Shard(0)}), target, {}, at::Reduction::Mean, 0);
    EXPECT_TRUE(std::isnan(full(loss).item<double>()));
  });
}

Sample regression(int64_t batch) {
  torch::manual_seed(13);
  return {at::randn({batch, 3}, at::kDouble), at::randn({batch, 3}, at::kDouble), {}};
}

TEST(Losses, MeansOverUnevenAndEmptyParts) {
  for (const int64_t batch : {5, 2}) {
    expect_same(regression(batch), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor&) {
      return at::mse_loss(scores, target);
    });
    expect_same(regression(batch), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor&) {
      return at::huber_loss(scores, target) + at::smooth_l1_loss(scores, target) + at::l1_loss(scores, target);
    });
  }
}

TEST(Losses, MeansOverABroadcastTarget) {
  Sample sample = regression(5);
  sample.target = sample.target[0];
  const at::Tensor want = at::mse_loss(sample.scores, sample.target);
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    const at::Tensor target = place(sample.target, mesh, {Replicate(), Replicate()});
    const at::Tensor scores = place(sample.scores, mesh, {Shard(0), Shard(1)});
    expect_close(full(at::mse_loss(scores, target)), want);
    expect_close(full(at::mse_loss(target, scores)), want);
  });
}

TEST(Losses, BinaryCrossEntropyWithWeights) {
  Sample sample = regression(5);
  sample.target = sample.target.sigmoid();
  sample.weight = at::rand({3}, at::kDouble);
  expect_same(sample, [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::binary_cross_entropy_with_logits(scores, target, weight, weight) +
           at::binary_cross_entropy(scores.sigmoid(), target, weight.expand_as(target));
  });
}

TEST(Losses, MarginsOfManyClasses) {
  expect_same(classes(5), [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
    return at::multi_margin_loss(scores, target, 1, 1, weight);
  });
  Sample sample = classes(5);
  sample.target = at::tensor({0, 2, -1, 1}, at::kLong).repeat({5, 1});
  expect_same(sample, [](const at::Tensor& scores, const at::Tensor& target, const at::Tensor&) {
    return at::multilabel_margin_loss(scores, target);
  });
}

TEST(Losses, DistancesOfCutTensors) {
  for (const double order : {1.0, 2.0, 3.0}) {
    expect_same(regression(5), [&](const at::Tensor& scores, const at::Tensor& target, const at::Tensor&) {
      return at::dist(scores, target, order);
    });
  }
}

TEST(LossScaling, EveryRankLearnsOfAnInfiniteGradient) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const bool is_finite : {true, false}) {
    at::Tensor gradient = at::arange(10, at::kFloat).view({5, 2});
    if (!is_finite) gradient[4][1] = infinity;
    on_mesh({4}, [&](const DeviceMesh& mesh) {
      for (const Placement& placement : {Shard(0), Shard(1), Replicate(), Partial()}) {
        if (placement.is_partial() && !is_finite) continue;  // an infinity cannot be split into a sum
        at::Tensor found = place(at::zeros({1}), mesh, {Replicate()});
        const at::Tensor scale = place(at::full({1}, 0.5), mesh, {Replicate()});
        const at::Tensor grad = place(gradient, mesh, {placement});
        at::_amp_foreach_non_finite_check_and_unscale_({grad}, found, scale);
        EXPECT_EQ(full(found).item<float>(), is_finite ? 0 : 1) << to_string(placement);
        if (is_finite) expect_close(full(grad), gradient * 0.5, to_string(placement));
      }
    });
  }
}

}  // namespace
}  // namespace serried::testing
