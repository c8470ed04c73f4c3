// Small models cut into stages, and the loop over micro-batches that every pipeline has to equal.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/pipeline/pipeline.h"
#include "tests/support/close.h"

namespace serried::testing::staged {

constexpr int64_t kWidth = 6;

/// Each of the seven, with the stages that it is run with.
struct ScheduleCase {
  Schedule schedule;
  int64_t stages_per_rank;
};
inline const std::vector<ScheduleCase> kAllTables = {{Schedule::GPipe, 1},
                                                     {Schedule::OneFOneB, 1},
                                                     {Schedule::Interleaved, 2},
                                                     {Schedule::LoopedBFS, 2},
                                                     {Schedule::InterleavedZeroBubble, 2},
                                                     {Schedule::ZBV, 2},
                                                     {Schedule::DualPipeV, 2}};

/// A layer with a residual, a norm and two matrices, so that ways to parameters branch off in many places.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 9));
    down = register_module("down", torch::nn::Linear(9, kWidth));
    scale = register_parameter("scale", torch::full({kWidth}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) { return x + scale * down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Layer);

/// Stages 0 to count - 1 of a net, equal on every rank.
inline std::vector<Layer> make_layers(int64_t count) {
  return seeded(3, [&] {
    std::vector<Layer> layers;
    for (int64_t i = 0; i < count; ++i) layers.emplace_back(Layer());
    return layers;
  });
}

inline at::Tensor values(at::IntArrayRef sizes, int64_t salt) {
  const int64_t count = c10::multiply_integers(sizes);
  return torch::sin(torch::arange(count, torch::kFloat) * 0.7 + double(salt)).view(sizes);
}

struct Batch {
  at::Tensor input, target;
};

/// [rows, length, kWidth]
inline Batch batch_of(int64_t rows, int64_t length, int64_t salt) {
  return {values({rows, length, kWidth}, salt), values({rows, length, kWidth}, salt + 100)};
}

inline at::Tensor loss_fn(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

/// What one process does: the losses, and gradients in the layers.
inline std::vector<at::Tensor> run_loop(std::vector<Layer>& layers, const Batch& batch, int64_t microbatches) {
  std::vector<at::Tensor> losses;
  const auto inputs = batch.input.tensor_split(microbatches), targets = batch.target.tensor_split(microbatches);
  for (int64_t i = 0; i < microbatches; ++i) {
    at::Tensor x = inputs[size_t(i)];
    for (Layer& layer : layers) x = layer->forward(x);
    const at::Tensor loss = loss_fn(x, targets[size_t(i)]);
    losses.push_back(loss.detach());
    (loss / double(microbatches)).backward();
  }
  return losses;
}

inline void expect_same_gradients(const torch::nn::Module& actual, const torch::nn::Module& expected,
                                  const std::string& what) {
  const auto theirs = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    expect_equal(item.value().grad(), theirs[item.key()].grad(), what + " " + item.key());
  }
}

/// Those of `rank`, in ascending order.
inline std::vector<PipelineStage> stages_of(const PipelineTable& table, int rank, const std::vector<Layer>& layers) {
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(rank)) stages.emplace_back(layers[size_t(index)]);
  return stages;
}

}  // namespace serried::testing::staged
