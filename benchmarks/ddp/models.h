// The models whose data parallel step is measured; pytorch.py has the same in Python.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

namespace serried::bench {

namespace nn = torch::nn;
using at::Tensor;

enum class Optimizer { sgd, adamw };

/// What a step gets: the same every time, another one on each rank.
struct Batch {
  Tensor input;
  Tensor target;
};

inline Tensor classes(at::IntArrayRef sizes, int64_t count) {
  return at::randint(count, sizes, at::kLong);
}

inline Tensor cross_entropy(const Tensor& logits, const Tensor& target) {
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), target.view(-1));
}

/// 10.5 M parameters, batch 4: little compute for much to communicate.
struct Mlp : nn::Module {
  static constexpr const char* name = "mlp";
  static constexpr Optimizer optimizer = Optimizer::sgd;
  nn::ModuleList layers;

  Mlp() {
    register_module("layers", layers);
    const std::vector<int64_t> widths = {1024, 2048, 2048, 2048, 16};
    for (size_t i = 1; i < widths.size(); ++i) layers->push_back(nn::Linear(widths[i - 1], widths[i]));
  }

  Tensor forward(Tensor x) {
    for (size_t i = 0; i + 1 < layers->size(); ++i) x = layers[i]->as<nn::Linear>()->forward(x).relu();
    return layers[layers->size() - 1]->as<nn::Linear>()->forward(x);
  }

  static Batch batch() { return {at::randn({4, 1024}), classes({4}, 16)}; }
  static Tensor loss(const Tensor& output, const Tensor& target) { return cross_entropy(output, target); }
};

struct BlockOptions {
  int64_t width;
  int64_t heads;
  bool fused;  // one projection gives query, key and value
  bool causal;
  bool gelu;
};

/// Attention and a feed forward layer four times as wide, both normed first and added.
struct Block : nn::Module {
  const BlockOptions options;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::ModuleList projections;
  nn::Linear out{nullptr}, up{nullptr}, down{nullptr};

  explicit Block(const BlockOptions& given) : options(given) {
    const int64_t width = options.width;
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    register_module("projections", projections);
    for (int i = 0; i < (options.fused ? 1 : 3); ++i) {
      projections->push_back(nn::Linear(width, options.fused ? 3 * width : width));
    }
    out = register_module("out", nn::Linear(width, width));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }

  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention(norm1(x));
    const Tensor inner = up(norm2(y));
    return y + down(options.gelu ? at::gelu(inner) : at::relu(inner));
  }

  Tensor attention(const Tensor& x) {
    std::vector<Tensor> parts;
    for (const auto& projection : *projections) parts.push_back(projection->as<nn::Linear>()->forward(x));
    if (options.fused) parts = parts[0].chunk(3, -1);
    for (Tensor& part : parts) part = part.unflatten(-1, {options.heads, -1}).transpose(1, 2);
    const Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, options.causal);
    return out(y.transpose(1, 2).flatten(2));
  }
};

/// 11 M parameters: 6 layers of width 384, 4 sequences of 64.
struct Transformer : nn::Module {
  static constexpr const char* name = "transformer";
  static constexpr Optimizer optimizer = Optimizer::sgd;
  nn::Embedding tokens{nullptr};
  nn::ModuleList blocks;
  nn::Linear head{nullptr};

  Transformer() {
    tokens = register_module("tokens", nn::Embedding(512, 384));
    register_module("blocks", blocks);
    for (int i = 0; i < 6; ++i) {
      blocks->push_back(std::make_shared<Block>(
          BlockOptions{.width = 384, .heads = 6, .fused = true, .causal = false, .gelu = false}));
    }
    head = register_module("head", nn::Linear(384, 512));
  }

  Tensor forward(const Tensor& ids) {
    Tensor x = tokens(ids);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x);
  }

  static Batch batch() { return {classes({4, 64}, 512), classes({4, 64}, 512)}; }
  static Tensor loss(const Tensor& output, const Tensor& target) { return cross_entropy(output, target); }
};

struct Residual : nn::Module {
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, shortcut{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};

  Residual(int64_t from, int64_t to, int64_t stride) {
    conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(from, to, 3).stride(stride).padding(1).bias(false)));
    norm1 = register_module("norm1", nn::BatchNorm2d(to));
    conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(to, to, 3).padding(1).bias(false)));
    norm2 = register_module("norm2", nn::BatchNorm2d(to));
    if (from == to && stride == 1) return;
    shortcut = register_module("shortcut", nn::Conv2d(nn::Conv2dOptions(from, to, 1).stride(stride).bias(false)));
  }

  Tensor forward(const Tensor& x) {
    const Tensor y = norm2(conv2(norm1(conv1(x)).relu()));
    return (y + (shortcut.is_empty() ? x : shortcut(x))).relu();
  }
};

/// ResNet-18 for small images, 11 M parameters: 8 images of 32 x 32.
struct ResNet : nn::Module {
  static constexpr const char* name = "resnet";
  static constexpr Optimizer optimizer = Optimizer::sgd;
  nn::Conv2d stem{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::ModuleList blocks;
  nn::Linear head{nullptr};

  ResNet() {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(3, 64, 3).padding(1).bias(false)));
    norm = register_module("norm", nn::BatchNorm2d(64));
    register_module("blocks", blocks);
    int64_t from = 64;
    for (int64_t to : {64, 128, 256, 512}) {
      blocks->push_back(std::make_shared<Residual>(from, to, from == to ? 1 : 2));
      blocks->push_back(std::make_shared<Residual>(to, to, 1));
      from = to;
    }
    head = register_module("head", nn::Linear(512, 10));
  }

  Tensor forward(const Tensor& images) {
    Tensor x = norm(stem(images)).relu();
    for (const auto& block : *blocks) x = block->as<Residual>()->forward(x);
    return head(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  static Batch batch() { return {at::randn({8, 3, 32, 32}), classes({8}, 10)}; }
  static Tensor loss(const Tensor& output, const Tensor& target) { return cross_entropy(output, target); }
};

/// 20 layers of width 64, batch 8: next to no compute, so that the cost of the host shows.
struct Deep : nn::Module {
  static constexpr const char* name = "deep";
  static constexpr Optimizer optimizer = Optimizer::adamw;
  nn::ModuleList layers;

  Deep() {
    register_module("layers", layers);
    for (int i = 0; i < 20; ++i) layers->push_back(nn::Linear(64, 64));
  }

  Tensor forward(Tensor x) {
    for (const auto& layer : *layers) x = layer->as<nn::Linear>()->forward(x).relu();
    return x;
  }

  static Batch batch() { return {at::randn({8, 64}), at::randn({8, 64})}; }
  static Tensor loss(const Tensor& output, const Tensor& target) { return at::mse_loss(output, target); }
};

/// 4 layers of width 256, 3.5 M parameters: 4 sequences of 128.
struct Gpt : nn::Module {
  static constexpr const char* name = "gpt";
  static constexpr Optimizer optimizer = Optimizer::adamw;
  nn::Embedding tokens{nullptr}, places{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};

  Gpt() {
    tokens = register_module("tokens", nn::Embedding(512, 256));
    places = register_module("places", nn::Embedding(128, 256));
    register_module("blocks", blocks);
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(std::make_shared<Block>(
          BlockOptions{.width = 256, .heads = 8, .fused = false, .causal = true, .gelu = true}));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({256})));
    head = register_module("head", nn::Linear(nn::LinearOptions(256, 512).bias(false)));
  }

  Tensor forward(const Tensor& ids) {
    Tensor x = tokens(ids) + places(at::arange(ids.size(1)));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  static Batch batch() { return {classes({4, 128}, 512), classes({4, 128}, 512)}; }
  static Tensor loss(const Tensor& output, const Tensor& target) { return cross_entropy(output, target); }
};

}  // namespace serried::bench
