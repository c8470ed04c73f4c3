// Stock modules of torch::nn with their parameters converted: results and gradients are those of the plain module.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

namespace nn = torch::nn;

template <class Holder>
using Forward = std::function<at::Tensor(Holder&, const at::Tensor&)>;

template <class Holder>
Holder copy_of(const Holder& module) {
  return Holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone()));
}

void backward(const at::Tensor& y) {
  (y * y.detach().sin()).sum().backward();
}

// A batch cut on every axis; parameters replicated, then all cut along dim 0.
template <class Holder>
void expect_as_plain(const Holder& made, const at::Tensor& batch, const Forward<Holder>& forward) {
  for (const Sizes& shape : {Sizes{2}, Sizes{2, 2}}) {
    for (const bool cut : {false, true}) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        const Placements cuts(shape.size(), Shard(0));
        Holder plain = copy_of(made);
        Holder ours = copy_of(made);
        distribute_module(*ours, mesh, [&](const std::string&, nn::Module& module, const DeviceMesh&) {
          for (const at::Tensor& p : module.parameters(false)) {
            if (cut) distribute_parameter(p, mesh, cuts);
          }
        });
        at::Tensor x = batch.clone();
        at::Tensor d = place(batch, mesh, cuts);
        if (x.is_floating_point()) x.requires_grad_(), d.requires_grad_();
        const at::Tensor expected = forward(plain, x);
        const at::Tensor y = forward(ours, d);
        backward(expected);
        backward(y);
        const std::string what = made->name() + (cut ? " cut" : " replicated");
        expect_close(full(y).detach(), expected.detach(), what);
        if (x.is_floating_point()) expect_close(full(d.grad()), x.grad(), what + " input");
        const auto parameters = ours->named_parameters();
        for (const auto& p : plain->named_parameters()) {
          if (p.value().grad().defined())
            expect_close(full(parameters[p.key()].grad()), p.value().grad(), what + " " + p.key());
        }
      });
    }
  }
}

template <class Holder>
void expect_as_plain(Holder made, const at::Tensor& batch) {
  made->to(at::kDouble);
  expect_as_plain<Holder>(made, batch, [](Holder& module, const at::Tensor& x) { return module(x); });
}

at::Tensor random(at::IntArrayRef sizes) {
  static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return at::randn(sizes, generator, at::kDouble);
}

TEST(StockModules, LinearAndNorms) {
  expect_as_plain(nn::Linear(6, 5), random({5, 6}));
  expect_as_plain(nn::BatchNorm1d(6), random({5, 6}));
  expect_as_plain(nn::BatchNorm2d(3), random({5, 3, 4, 4}));
  expect_as_plain(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true)), random({5, 3, 4, 4}));
  expect_as_plain(nn::GroupNorm(nn::GroupNormOptions(2, 4)), random({5, 4, 3}));
  expect_as_plain(nn::LayerNorm(nn::LayerNormOptions({4, 3})), random({5, 4, 3}));
  expect_as_plain(nn::LocalResponseNorm(2), random({5, 4, 3, 3}));
}

TEST(StockModules, Convolutions) {
  expect_as_plain(nn::Conv1d(nn::Conv1dOptions(4, 6, 3).padding(1)), random({5, 4, 7}));
  expect_as_plain(nn::Conv2d(nn::Conv2dOptions(4, 6, 3).padding(1).groups(2)), random({3, 4, 5, 5}));
  expect_as_plain(nn::Conv2d(nn::Conv2dOptions(3, 6, 3).stride(2).dilation(2)), random({3, 3, 9, 9}));
  expect_as_plain(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 6, 3).stride(2)), random({3, 4, 5, 5}));
  expect_as_plain(nn::Conv3d(nn::Conv3dOptions(2, 3, 2)), random({3, 2, 4, 4, 4}));
}

TEST(StockModules, PoolsAndShapes) {
  expect_as_plain(nn::MaxPool2d(2), random({5, 3, 6, 6}));
  expect_as_plain(nn::AvgPool3d(2), random({5, 3, 4, 4, 4}));
  expect_as_plain(nn::AdaptiveMaxPool2d(2), random({5, 3, 6, 6}));
  expect_as_plain(nn::PixelShuffle(2), random({3, 4, 3, 3}));
  expect_as_plain(nn::Unfold(2), random({3, 4, 4, 4}));
  expect_as_plain(nn::Fold(nn::FoldOptions({4, 4}, {2, 2})), random({3, 8, 9}));
  expect_as_plain(nn::ReflectionPad2d(1), random({3, 2, 4, 4}));
  expect_as_plain(nn::GLU(), random({5, 6}));
  expect_as_plain(nn::PReLU(nn::PReLUOptions().num_parameters(4)), random({5, 4, 3}));
}

TEST(StockModules, EmbeddingsAndAttention) {
  expect_as_plain(nn::Embedding(9, 4), at::arange(15).view({5, 3}) % 9);
  expect_as_plain(nn::Embedding(nn::EmbeddingOptions(9, 4).padding_idx(2)), at::arange(15).view({5, 3}) % 9);
  nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(8, 2));
  attention->to(at::kDouble);
  expect_as_plain<nn::MultiheadAttention>(
      attention, random({5, 3, 8}),
      [](nn::MultiheadAttention& module, const at::Tensor& x) { return std::get<0>(module(x, x, x)); });
}

TEST(StockModules, Transformers) {
  expect_as_plain(
      nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0.0)),
      random({5, 3, 8}));
  nn::Transformer transformer(nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(12).dropout(0.0));
  transformer->to(at::kDouble);
  expect_as_plain<nn::Transformer>(transformer, random({5, 3, 8}),
                                   [](nn::Transformer& module, const at::Tensor& x) { return module(x, x * 2); });
}

// They make their first state themselves, as plain zeros, which count as replicated inside the scope.
TEST(StockModules, RecurrentOnesInAScopeThatReplicatesTheirFirstState) {
  nn::LSTM lstm(nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true));
  nn::GRU gru(nn::GRUOptions(4, 3).batch_first(true));
  nn::LSTMCell cell(4, 3);
  // oneDNN's LSTM takes float only.
  gru->to(at::kDouble);
  cell->to(at::kDouble);
  const auto scoped = [](auto&& call) {
    const ImplicitReplication plain_is_replicated;
    return std::get<0>(call());
  };
  expect_as_plain<nn::LSTM>(lstm, random({5, 3, 4}).to(at::kFloat),
                            [&](nn::LSTM& module, const at::Tensor& x) { return scoped([&] { return module(x); }); });
  expect_as_plain<nn::GRU>(gru, random({5, 3, 4}),
                           [&](nn::GRU& module, const at::Tensor& x) { return scoped([&] { return module(x); }); });
  expect_as_plain<nn::LSTMCell>(cell, random({5, 4}), [&](nn::LSTMCell& module, const at::Tensor& x) {
    return scoped([&] { return module(x); });
  });
}

}  // namespace
}  // namespace serried::testing
