// Models of every kind that fully_shard meets, each with its layers, and training that is compared with plain LibTorch.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/models.h"

namespace serried::testing::sharded {

/// A model that makes its own inputs.
struct Net : torch::nn::Module {
  /// Of a batch that `salt` chooses.
  virtual at::Tensor loss(int64_t salt) = 0;
  /// What becomes blocks of their own, in the order of forward.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> layers() = 0;

  at::Tensor input(at::IntArrayRef sizes, int64_t salt) {
    return models::values(sizes, salt).to(parameters().at(0).scalar_type());
  }
};
using NetPtr = std::shared_ptr<Net>;

/// Rows that no world size divides, and biases with fewer rows than ranks.
struct Mlp final : Net {
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, head{nullptr};

  Mlp() {
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 5));
    third = register_module("third", torch::nn::Linear(5, 2));
    head = register_module("head", torch::nn::Linear(2, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::gelu(third(torch::relu(second(torch::tanh(first(x)))))));
  }
  at::Tensor loss(int64_t salt) override { return forward(input({6, 5}, salt)).square().mean(); }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {first.ptr(), second.ptr(), third.ptr()}; }
};

struct Conv final : Net {
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d batch_norm{nullptr};
  torch::nn::GroupNorm group_norm{nullptr};

  Conv() {
    first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3).padding(1)));
    batch_norm = register_module("batch_norm", torch::nn::BatchNorm2d(6));
    second = register_module("second", torch::nn::Conv2d(6, 3, 3));
    group_norm = register_module("group_norm", torch::nn::GroupNorm(1, 3));
  }
  at::Tensor loss(int64_t salt) override {
    return group_norm(second(torch::relu(batch_norm(first(input({2, 2, 6, 5}, salt)))))).pow(3).mean();
  }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {first.ptr(), second.ptr()}; }
};

struct Lstm final : Net {
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear out{nullptr};

  Lstm() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(3, 5).num_layers(2).batch_first(true)));
    out = register_module("out", torch::nn::Linear(5, 2));
  }
  at::Tensor loss(int64_t salt) override { return out(std::get<0>(lstm(input({2, 4, 3}, salt)))).square().mean(); }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {lstm.ptr()}; }
};

struct Attention final : Net {
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LayerNorm norm{nullptr};

  Attention() {
    attention = register_module("attention", torch::nn::MultiheadAttention(6, 2));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  }
  at::Tensor loss(int64_t salt) override {
    const at::Tensor x = input({5, 2, 6}, salt);
    return norm(std::get<0>(attention(x, x, x)) + x).pow(3).mean();
  }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {attention.ptr()}; }
};

struct GptBlock final : torch::nn::Module {
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};

  explicit GptBlock(int64_t d) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    qkv = register_module("qkv", torch::nn::Linear(d, 3 * d));
    out = register_module("out", torch::nn::Linear(d, d));
    up = register_module("up", torch::nn::Linear(d, 4 * d));
    down = register_module("down", torch::nn::Linear(4 * d, d));
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t b = x.size(0), t = x.size(1), d = x.size(2);
    auto parts = qkv(norm1(x)).split(d, 2);
    for (at::Tensor& part : parts) part = part.view({b, t, 2, d / 2}).transpose(1, 2);
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const at::Tensor z = x + out(y.transpose(1, 2).contiguous().view({b, t, d}));
    return z + down(torch::gelu(up(norm2(z))));
  }
};

/// Its table reads words and scores them.
struct Gpt final : Net {
  torch::nn::Embedding table{nullptr}, places{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};

  explicit Gpt(int64_t depth = 3) {
    table = register_module("table", torch::nn::Embedding(11, 6));
    places = register_module("places", torch::nn::Embedding(4, 6));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(GptBlock(6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  }
  at::Tensor loss(int64_t salt) override {
    const at::Tensor tokens = models::indices(3, 5, 11, int(salt));
    const at::Tensor in = tokens.narrow(1, 0, 4), target = tokens.narrow(1, 1, 4);
    at::Tensor x = table(in) + places(torch::arange(4));
    for (const auto& block : *blocks) x = block->as<GptBlock>()->forward(x);
    const at::Tensor logits = torch::nn::functional::linear(norm(x), table->weight);
    return torch::nn::functional::cross_entropy(logits.view({-1, 11}), target.reshape({-1}));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {blocks->begin(), blocks->end()}; }
};

struct NamedNet {
  std::string name;
  std::function<NetPtr()> make;
};

inline std::vector<NamedNet> all_nets() {
  return {{"Mlp", [] { return std::make_shared<Mlp>(); }},
          {"Conv", [] { return std::make_shared<Conv>(); }},
          {"Lstm", [] { return std::make_shared<Lstm>(); }},
          {"Attention", [] { return std::make_shared<Attention>(); }},
          {"Gpt", [] { return std::make_shared<Gpt>(); }}};
}

/// Equal on every rank.
inline NetPtr make(const std::function<NetPtr()>& fn, at::ScalarType dtype = at::kFloat) {
  NetPtr net = seeded(7, fn);
  net->to(dtype);
  return net;
}

/// Layers first, then the rest.
inline FullyShardHandle shard_all(Net& net, const FullyShardOptions& options = {}) {
  for (const auto& layer : net.layers()) fully_shard(*layer, options);
  return fully_shard(net, options);
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

inline std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.05));
}

/// The parameters of a sharded net, whole; all ranks call it.
inline std::vector<at::Tensor> values_of(const torch::nn::Module& net) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const at::Tensor& p : net.parameters()) {
    const at::Tensor value = p.detach();
    values.push_back(is_dtensor(value) ? DTensor(value).full_tensor().clone() : value.clone());
  }
  return values;
}

}  // namespace serried::testing::sharded
