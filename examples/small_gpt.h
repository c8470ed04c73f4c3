// The small GPT of examples 10 and 11: a model that knows nothing of ranks, the plan that cuts it, and its text.
#pragma once

#include <serried/serried.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace small_gpt {

namespace nn = torch::nn;
using namespace serried;

constexpr int64_t kContext = 32;
constexpr int64_t kWidth = 128;
constexpr int64_t kHeads = 4;
constexpr int64_t kLayers = 2;
constexpr int64_t kBatch = 8;  // of all ranks together

inline nn::LayerNorm layer_norm() {
  return nn::LayerNorm(nn::LayerNormOptions({kWidth}));
}

// Stock modules and a forward that knows nothing of ranks.
struct BlockImpl : nn::Module {
  nn::LayerNorm norm_1 = register_module("norm_1", layer_norm());
  nn::Linear qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm_2 = register_module("norm_2", layer_norm());
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));

  at::Tensor attention(const at::Tensor& x) {
    const at::Tensor parts = qkv(x).unflatten(-1, {3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    return out(y.transpose(1, 2).flatten(2));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm_1(x));
    return x + down(torch::gelu(up(norm_2(x))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding letters = register_module("letters", nn::Embedding(256, kWidth));
  nn::Embedding places = register_module("places", nn::Embedding(kContext, kWidth));
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::LayerNorm norm = register_module("norm", layer_norm());
  nn::Linear head = register_module("head", nn::Linear(kWidth, 256));

  GptImpl() {
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
  }

  at::Tensor forward(const at::Tensor& ids) {
    return head(norm(blocks->forward(letters(ids) + places(at::arange(ids.size(1))))));
  }
};
TORCH_MODULE(Gpt);

// Between the blocks a rank holds a part of the letters (dim 1), inside them a part of heads and hidden units.
inline const ParallelPlan kPlan = {
    {"letters", RowwiseParallel({.output = {Shard(1)}})},
    {"blocks.*.norm_?", SequenceParallel()},
    {"blocks.*.qkv", ColwiseParallel({.fused = 3})},
    {"blocks.*.out", RowwiseParallel({.output = {Shard(1)}})},
    {"blocks.*.up", ColwiseParallel()},
    {"blocks.*.down", RowwiseParallel({.output = {Shard(1)}})},
    {"norm", SequenceParallel()},
    {"head", ColwiseParallel()},
};

inline at::Tensor read_ids(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  TORCH_CHECK_VALUE(int64_t(text.size()) > 2 * kContext, "there is no text to learn from in ", path);
  at::Tensor ids = at::empty({int64_t(text.size())}, at::kLong);
  std::transform(text.begin(), text.end(), ids.mutable_data_ptr<int64_t>(), [](char c) { return uint8_t(c); });
  return ids;
}

/// Rows `part` of `parts` of the batch of a step: [rows, kContext + 1].
inline at::Tensor batch_of(const at::Tensor& ids, int step, int64_t part, int64_t parts) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step));
  const at::Tensor begins = at::randint(ids.size(0) - kContext, {kBatch}, generator, at::kLong);
  return ids.index({begins.chunk(parts)[size_t(part)].unsqueeze(1) + at::arange(kContext + 1)});
}

/// What this rank holds of parameters, gradients and the two moments of AdamW.
inline double megabytes(const nn::Module& net) {
  int64_t bytes = 0;
  for (const at::Tensor& p : net.parameters()) bytes += (is_dtensor(p) ? DTensor(p).to_local() : p).nbytes();
  return 4e-6 * double(bytes);
}

}  // namespace small_gpt
