// Small models of every kind that data parallel training meets.
#include "tests/support/models.h"

#include <unordered_set>

namespace serried::testing::models {

namespace nn = torch::nn;
using at::Tensor;

Tensor values(at::IntArrayRef sizes, int64_t salt) {
  const Tensor places = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return (places * 0.37 + salt).sin().to(at::kFloat).view(sizes);
}

Tensor indices(int64_t count, int64_t length, int64_t limit, int rank) {
  return (at::arange(count * length, at::kLong) * 3 + rank).remainder(limit).view({count, length});
}

void fill_parameters(nn::Module& module) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (Tensor& parameter : module.parameters()) {
    const int64_t salt = int64_t(seen.size());
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameter.copy_(values(parameter.sizes(), salt) * 0.5);
  }
}

Mlp::Mlp() {
  hidden = register_module("hidden", nn::Linear(5, 7));
  dropout = register_module("dropout", nn::Dropout(0.0));
  out = register_module("out", nn::Linear(7, 3));
}

Tensor Mlp::forward(const Tensor& x) {
  return out(dropout(hidden(x).tanh()));
}

ConvNorm::ConvNorm() {
  first = register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1).bias(false)));
  norm = register_module("norm", nn::BatchNorm2d(4));
  second = register_module("second", nn::Conv2d(nn::Conv2dOptions(4, 3, 3).stride(2)));
}

Tensor ConvNorm::forward(const Tensor& x) {
  return second(norm(first(x)).relu());
}

Recurrent::Recurrent() {
  lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(3, 4).num_layers(2).batch_first(true)));
  out = register_module("out", nn::Linear(4, 2));
}

Tensor Recurrent::forward(const Tensor& x) {
  const Tensor states = std::get<0>(lstm->forward(x));
  return out(states.select(1, -1));
}

Lookup::Lookup(bool sparse) {
  table = register_module("table", nn::Embedding(nn::EmbeddingOptions(11, 4).sparse(sparse)));
  out = register_module("out", nn::Linear(4, 3));
}

Tensor Lookup::forward(const Tensor& tokens) {
  return out(table(tokens).mean(1));
}

Tied::Tied() {
  table = register_module("table", nn::Embedding(7, 5));
  score = register_parameter("score", table->weight);
}

Tensor Tied::forward(const Tensor& tokens) {
  return at::linear(table(tokens).tanh(), score);
}

Branches::Branches() {
  always = register_module("always", nn::Linear(4, 3));
  sometimes = register_module("sometimes", nn::Linear(4, 3));
  never = register_module("never", nn::Linear(4, 3));
}

Tensor Branches::forward(const Tensor& x, bool both) {
  const Tensor y = always(x);
  return both ? y + sometimes(x) : y;
}

Frozen::Frozen() {
  fixed = register_module("fixed", nn::Linear(4, 6));
  out = register_module("out", nn::Linear(6, 3));
  for (Tensor& parameter : fixed->parameters()) parameter.set_requires_grad(false);
}

Tensor Frozen::forward(const Tensor& x) {
  return out(fixed(x).tanh());
}

TwoHeads::TwoHeads() {
  trunk = register_module("trunk", nn::Linear(4, 5));
  left = register_module("left", nn::Linear(5, 3));
  right = register_module("right", nn::Linear(5, 2));
}

std::tuple<Tensor, Tensor> TwoHeads::forward(const Tensor& x) {
  const Tensor y = trunk(x).tanh();
  return {left(y), right(y)};
}

Reused::Reused() {
  layer = register_module("layer", nn::Linear(5, 5));
}

Tensor Reused::forward(Tensor x) {
  for (int time = 0; time < 3; ++time) x = layer(x).tanh();
  return x;
}

}  // namespace serried::testing::models
