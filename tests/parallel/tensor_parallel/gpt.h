// A small GPT of stock torch::nn modules, plans that cut it, and how its training compares with one process.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::gpt {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct GptOptions {
  int64_t layers = 2;
  int64_t width = 24;
  int64_t heads = 6;
  int64_t kv_heads = 6;
  int64_t vocab = 13;
  bool fused = false;  // q, k and v side by side in one matrix
  bool tied = false;   // the head is the table of tokens
};

constexpr int64_t kContext = 5;

struct BlockImpl : nn::Module {
  explicit BlockImpl(const GptOptions& o) : options(o) {
    const int64_t kv = o.width / o.heads * o.kv_heads;
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({o.width})));
    if (o.fused) {
      qkv = register_module("qkv", nn::Linear(o.width, 3 * o.width));
    } else {
      q = register_module("q", nn::Linear(o.width, o.width));
      k = register_module("k", nn::Linear(o.width, kv));
      v = register_module("v", nn::Linear(o.width, kv));
    }
    out = register_module("out", nn::Linear(o.width, o.width));
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({o.width})));
    up = register_module("up", nn::Linear(o.width, 4 * o.width));
    down = register_module("down", nn::Linear(4 * o.width, o.width));
  }

  at::Tensor attention(const at::Tensor& x) {
    const int64_t size = options.width / options.heads;
    const auto heads = [&](const at::Tensor& t, int64_t count) {
      return t.view({t.size(0), t.size(1), count, size}).transpose(1, 2);
    };
    std::vector<at::Tensor> parts;
    if (options.fused) {
      parts = qkv(x).split(options.width, 2);
    } else {
      parts = {q(x), k(x), v(x)};
    }
    const at::Tensor y = at::scaled_dot_product_attention(
        heads(parts[0], options.heads), heads(parts[1], options.kv_heads), heads(parts[2], options.kv_heads), {}, 0,
        true, std::nullopt, options.heads != options.kv_heads);
    return out(y.transpose(1, 2).contiguous().view({x.size(0), x.size(1), options.width}));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm_1(x));
    return x + down(torch::gelu(up(norm_2(x))));
  }

  GptOptions options;
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// A head whose weight is somebody else's parameter.
struct TiedHead : nn::LinearImpl {
  explicit TiedHead(const at::Tensor& table)
      : nn::LinearImpl(nn::LinearOptions(table.size(1), table.size(0)).bias(false)) {
    weight = table;
    parameters_.erase("weight");
  }
};

struct GptImpl : nn::Module {
  explicit GptImpl(const GptOptions& o) {
    tokens = register_module("tokens", nn::Embedding(o.vocab, o.width));
    places = register_module("places", nn::Embedding(kContext, o.width));
    blocks = register_module("blocks", nn::Sequential());
    for (int64_t i = 0; i < o.layers; ++i) blocks->push_back(Block(o));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({o.width})));
    head = o.tied ? nn::Linear(std::shared_ptr<nn::LinearImpl>(std::make_shared<TiedHead>(tokens->weight)))
                  : nn::Linear(o.width, o.vocab);
    register_module("head", head);
  }

  at::Tensor forward(const at::Tensor& ids) {
    return head(norm(blocks->forward(tokens(ids) + places(at::arange(ids.size(1))))));
  }

  nn::Embedding tokens{nullptr}, places{nullptr};
  nn::Sequential blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

inline Gpt make_gpt(const GptOptions& options = {}) {
  Gpt net = seeded(1, [&] { return Gpt(options); });
  net->to(at::kDouble);
  return net;
}

inline ParallelPlan tensor_plan(const GptOptions& options = {}) {
  ParallelPlan plan = {{"tokens", RowwiseParallel()},
                       {"blocks.*.out", RowwiseParallel()},
                       {"blocks.*.up", ColwiseParallel()},
                       {"blocks.*.down", RowwiseParallel()},
                       {"head", ColwiseParallel()}};
  if (options.fused) {
    plan.push_back({"blocks.*.qkv", ColwiseParallel({.fused = 3})});
  } else {
    plan.push_back({"blocks.*.[qkv]", ColwiseParallel()});
  }
  return plan;
}

inline ParallelPlan sequence_plan(const GptOptions& options = {}) {
  ParallelPlan plan = {{"tokens", RowwiseParallel({.output = {Shard(1)}})},
                       {"blocks.*.norm_*", SequenceParallel()},
                       {"blocks.*.out", RowwiseParallel({.output = {Shard(1)}})},
                       {"blocks.*.up", ColwiseParallel()},
                       {"blocks.*.down", RowwiseParallel({.output = {Shard(1)}})},
                       {"norm", SequenceParallel()},
                       {"head", ColwiseParallel()}};
  if (options.fused) {
    plan.push_back({"blocks.*.qkv", ColwiseParallel({.fused = 3})});
  } else {
    plan.push_back({"blocks.*.[qkv]", ColwiseParallel()});
  }
  return plan;
}

struct Batch {
  at::Tensor ids, targets;
};

inline Batch batch_of(int step, int64_t size = 4, int64_t vocab = 13) {
  return seeded(uint64_t(100 + step), [&] {
    return Batch{torch::randint(vocab, {size, kContext}, at::kLong),
                 torch::randint(vocab, {size, kContext}, at::kLong)};
  });
}

inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return F::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

/// The loss of one process, and gradients in its parameters.
inline double train_once(Gpt& net, const Batch& batch) {
  const at::Tensor loss = loss_of(net(batch.ids), batch.targets);
  loss.backward();
  return loss.item<double>();
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::allclose(actual, expected, 1e-9, 1e-9)) << what << "\n" << actual << "\n" << expected;
}

inline void expect_gradients_of(nn::Module& expected, nn::Module& actual) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    const DTensor grad(item.value().grad());
    EXPECT_EQ(grad.placements(), DTensor(item.value()).placements()) << item.key();
    expect_near(grad.full_tensor(), wanted[item.key()].grad(), item.key());
  }
}

}  // namespace serried::testing::gpt
