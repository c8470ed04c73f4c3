// A small GPT cut into stages of one block.
#pragma once

#include <torch/torch.h>

#include "serried/parallel/recompute.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing::staged {

/// A stage of a GPT: the table of words in the first one, the head in the last.
struct GptStageImpl : torch::nn::Module {
  GptStageImpl(const gpt::Gpt& net, int64_t index, bool recomputes_) : recomputes(recomputes_) {
    if (index == 0) {
      tokens = register_module("tokens", net->tokens);
      places = register_module("places", net->places);
    }
    blocks = register_module("blocks", torch::nn::Sequential());
    blocks->push_back(net->blocks->ptr<gpt::BlockImpl>(size_t(index)));
    if (index + 1 == int64_t(net->blocks->size())) {
      norm = register_module("norm", net->norm);
      head = register_module("head", net->head);
    }
  }
  at::Tensor forward(at::Tensor x) {
    if (tokens) x = tokens(x) + places(at::arange(x.size(1)));
    x = recomputes ? recompute([this](const at::Tensor& y) { return blocks->forward(y); }, x) : blocks->forward(x);
    return head ? head(norm(x)) : x;
  }
  ParallelPlan plan(bool by_sequence) const {
    const RowwiseParallel row = by_sequence ? RowwiseParallel({.output = {Shard(1)}}) : RowwiseParallel();
    ParallelPlan plan = {{"blocks.*.[qkv]", ColwiseParallel()},
                         {"blocks.*.out", row},
                         {"blocks.*.up", ColwiseParallel()},
                         {"blocks.*.down", row}};
    if (by_sequence) plan.push_back({"blocks.*.norm_*", SequenceParallel()});
    if (tokens) plan.push_back({"tokens", row});
    if (head && by_sequence) plan.push_back({"norm", SequenceParallel()});
    if (head) plan.push_back({"head", ColwiseParallel()});
    return plan;
  }

  bool recomputes;
  torch::nn::Embedding tokens{nullptr}, places{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(GptStage);

}  // namespace serried::testing::staged
