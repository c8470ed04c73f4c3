// Models whose linear layers are placed by hand as tensor parallel has them, with or without a redistribute after each
// pending sum.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "serried/tensor/making/modules.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::hand_placed {

namespace nn = torch::nn;

inline constexpr int64_t kBatch = 3, kLength = 7, kWidth = 16, kHeads = 4;

// Where a programmer who counts bytes would put a redistribute.
inline at::Tensor whole(const at::Tensor& x, bool by_hand) {
  return by_hand ? at::Tensor(DTensor(x).redistribute(without_partial(DTensor(x).placements()))) : x;
}

struct FeedForward : nn::Module {
  explicit FeedForward(bool is_biased) {
    up = register_module("up", nn::Linear(nn::LinearOptions(kWidth, 4 * kWidth).bias(is_biased)));
    down = register_module("down", nn::Linear(nn::LinearOptions(4 * kWidth, kWidth).bias(is_biased)));
  }
  at::Tensor forward(const at::Tensor& x) { return whole(down(torch::gelu(up(x))), by_hand); }

  nn::Linear up{nullptr}, down{nullptr};
  bool by_hand = false;
};

struct Attention : nn::Module {
  Attention() {
    for (const char* name : {"q", "k", "v"}) in.push_back(register_module(name, nn::Linear(kWidth, kWidth)));
    out = register_module("out", nn::Linear(kWidth, kWidth));
  }
  at::Tensor heads(size_t which, const at::Tensor& x) {
    return in[which](x).view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::scaled_dot_product_attention(heads(0, x), heads(1, x), heads(2, x));
    return whole(out(y.transpose(1, 2).contiguous().view(x.sizes())), by_hand);
  }

  std::vector<nn::Linear> in;
  nn::Linear out{nullptr};
  bool by_hand = false;
};

struct Block : nn::Module {
  Block() {
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", std::make_shared<Attention>());
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    mlp = register_module("mlp", std::make_shared<FeedForward>(true));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention->forward(norm_1(x));
    return y + mlp->forward(norm_2(y));
  }

  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  std::shared_ptr<Attention> attention;
  std::shared_ptr<FeedForward> mlp;
};

struct Transformer : nn::Module {
  Transformer() {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    head = register_module("head", nn::Linear(kWidth, 11));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return head(x);
  }

  std::vector<std::shared_ptr<Block>> blocks;
  nn::Linear head{nullptr};
};

struct Mlp : nn::Module {
  Mlp() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<FeedForward>(i % 2 == 0)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = torch::relu(layer->forward(x));
    return x;
  }

  std::vector<std::shared_ptr<FeedForward>> layers;
};

inline void place(nn::Module& module, const DeviceMesh& mesh, bool by_hand) {
  distribute_module(module, mesh, [&](const std::string& name, nn::Module& part, const DeviceMesh&) {
    if (auto* layer = dynamic_cast<FeedForward*>(&part)) layer->by_hand = by_hand;
    if (auto* layer = dynamic_cast<Attention*>(&part)) layer->by_hand = by_hand;
    auto* linear = dynamic_cast<nn::LinearImpl*>(&part);
    if (linear == nullptr || name.ends_with("head")) return;
    const bool is_last = name.ends_with("down") || name.ends_with("out");
    distribute_parameter(linear->weight, mesh, {Shard(is_last ? 1 : 0)});
    if (linear->bias.defined()) distribute_parameter(linear->bias, mesh, {is_last ? Replicate() : Shard(0)});
  });
}

inline DTensor batch(const DeviceMesh& mesh) {
  return distribute_tensor(iota({kBatch, kLength, kWidth}).sin(), mesh, {Replicate()});
}

/// The same weights on all ranks, in f64.
template <class Net>
std::shared_ptr<Net> make(const DeviceMesh& mesh, bool by_hand) {
  auto net = seeded(3, [] { return std::make_shared<Net>(); });
  net->to(at::kDouble);
  place(*net, mesh, by_hand);
  return net;
}

}  // namespace serried::testing::hand_placed
