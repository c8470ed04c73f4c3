// A small GPT that is told its positions, so that it works on any part of a sequence.
#pragma once

#include <torch/torch.h>

#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing::long_gpt {

namespace nn = torch::nn;

struct LongGptImpl : nn::Module {
  LongGptImpl(const gpt::GptOptions& options, int64_t length) {
    tokens = register_module("tokens", nn::Embedding(options.vocab, options.width));
    places = register_module("places", nn::Embedding(length, options.width));
    blocks = register_module("blocks", nn::ModuleList());
    for (int64_t i = 0; i < options.layers; ++i) blocks->push_back(gpt::Block(options));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.width})));
    head = register_module("head", nn::Linear(options.width, options.vocab));
  }

  at::Tensor forward(const at::Tensor& ids, const at::Tensor& positions) {
    at::Tensor x = tokens(ids) + places(positions);
    for (size_t i = 0; i < blocks->size(); ++i) x = run_block(blocks->ptr<gpt::BlockImpl>(i), x);
    return head(norm(x));
  }

  std::function<at::Tensor(const std::shared_ptr<gpt::BlockImpl>&, const at::Tensor&)> run_block =
      [](const auto& block, const at::Tensor& x) { return block->forward(x); };
  nn::Embedding tokens{nullptr}, places{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(LongGpt);

inline LongGpt make_net(const gpt::GptOptions& options, int64_t length, at::ScalarType dtype = at::kDouble) {
  return seeded(3, [&] {
    LongGpt net(options, length);
    net->to(dtype);
    return net;
  });
}

struct Sequence {
  at::Tensor ids, targets;  // [batch, length]
  at::Tensor positions;     // [length]
};

inline Sequence sequence_of(int64_t length, int64_t step, int64_t batch = 2) {
  const at::Tensor all = (at::arange(batch * (length + 1)) * 7 + 3 * step).remainder(13).view({batch, length + 1});
  return {all.narrow(1, 0, length).clone(), all.narrow(1, 1, length).clone(), at::arange(length)};
}

/// Summed over tokens of this rank, divided by those of all: parts add up to the mean.
inline at::Tensor share_of_loss(const at::Tensor& logits, const at::Tensor& targets, int64_t all_tokens) {
  namespace F = torch::nn::functional;
  return F::cross_entropy(logits.flatten(0, 1), targets.flatten(),
                          F::CrossEntropyFuncOptions().reduction(torch::kSum)) /
         double(all_tokens);
}

inline std::vector<at::Tensor> gradients_of(const nn::Module& net) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& p : net.parameters()) gradients.push_back(p.grad().clone());
  return gradients;
}

/// What one process gets for the whole sequence.
inline std::vector<at::Tensor> whole_gradients(const gpt::GptOptions& options, int64_t length, int64_t batch = 2) {
  LongGpt net = make_net(options, length);
  const Sequence s = sequence_of(length, 0, batch);
  share_of_loss(net(s.ids, s.positions), s.targets, s.ids.numel()).backward();
  return gradients_of(*net);
}

inline void expect_near(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                        const std::string& what, double tolerance = 1e-9) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes()) << what;
    EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), tolerance) << what << ", tensor " << i;
  }
}

}  // namespace serried::testing::long_gpt
