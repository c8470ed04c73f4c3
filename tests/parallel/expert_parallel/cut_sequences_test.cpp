// Experts behind attention whose sequence is cut: tokens of all data and context parallel ranks meet at the experts.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "serried/comm/collectives/collectives.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "serried/parallel/weighted_loss.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::moe_with_cut_sequences {
namespace {

constexpr int64_t kFeatures = 8, kHeads = 2, kNumExperts = 4, kPositions = 11, kDataRanks = 2;
constexpr int kSteps = 20;
constexpr double kMaxNorm = 0.05;  // below the norms of all steps

using ExpertsOf = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& logits)>;

struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    register_module("qkv", qkv);
    register_module("router", router);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x, const ExpertsOf& experts) {
    const at::Tensor parts =
        qkv(x).view({x.size(0), x.size(1), 3, kHeads, kFeatures / kHeads}).permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    const at::Tensor tokens = x + y.transpose(1, 2).flatten(2);
    return out(tokens + experts(tokens, router(tokens)));
  }
  torch::nn::Linear qkv{kFeatures, 3 * kFeatures}, router{kFeatures, kNumExperts}, out{kFeatures, 3};
};
TORCH_MODULE(Shared);

struct StackedImpl : torch::nn::Module {
  StackedImpl() { weight = register_parameter("weight", at::empty({kNumExperts, kFeatures, kFeatures})); }
  at::Tensor forward(const DispatchedTokens& sent) { return torch::tanh(expert_linear(sent.tokens, sent, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Stacked);

struct Nets {
  Shared shared;
  Stacked experts;
  Nets() {
    models::fill_parameters(*shared);
    models::fill_parameters(*experts);
    shared->to(at::kDouble);
    experts->to(at::kDouble);
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = shared->parameters();
    all.push_back(experts->weight);
    return all;
  }
  ExpertsOf run(const MoeOptions& options) {
    return [this, options](const at::Tensor& x, const at::Tensor& logits) {
      return moe(
          x, logits, [this](const DispatchedTokens& sent) { return experts(sent); }, options);
    };
  }
};

at::Tensor batch_of(int64_t data_rank, int64_t step) {
  return models::values({1, kPositions, kFeatures}, 50 * step + data_rank).to(at::kDouble);
}

// Losses, norms, then parameters.
std::vector<at::Tensor> trained_alone() {
  Nets nets;
  AdamW optimizer(nets.parameters(), torch::optim::AdamWOptions(0.01));
  std::vector<at::Tensor> values, norms;
  run_ranks(1, [&](const Group&) {
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor x = at::cat({batch_of(0, step), batch_of(1, step)});
      const at::Tensor loss = nets.shared->forward(x, nets.run({.top_k = 2})).square().mean();
      loss.backward();
      values.push_back(loss.detach());
      norms.push_back(clip_grad_norm_(nets.parameters(), kMaxNorm).tensor().clone());
      EXPECT_GT(norms.back().item<double>(), kMaxNorm);
      optimizer.step();
    }
  });
  values.insert(values.end(), norms.begin(), norms.end());
  for (const at::Tensor& p : nets.parameters()) values.push_back(p.detach());
  return values;
}

std::vector<at::Tensor> trained(const DeviceMesh& mesh, AttentionWay way) {
  const DeviceMesh all = mesh.flatten("all");
  Nets nets;
  distribute_parameter(nets.experts->weight, all, {Shard(0)});
  DistributedDataParallel shared(nets.shared, {.process_group = all.get_group()});
  AdamW optimizer(nets.parameters(), torch::optim::AdamWOptions(0.01));
  std::vector<at::Tensor> values, norms;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor x = batch_of(mesh.get_local_rank("dp"), step);
    const ContextParallel scope(mesh["cp"], {.buffers = {x}, .seq_dims = {1}, .rotate = way});
    const ExpertsOf experts = nets.run({.mesh = all, .top_k = 2, .average_gradients = true});
    const at::Tensor loss = scale_loss(shared(x, experts).square().mean(), x.size(1), all.get_group());
    loss.backward();
    values.push_back(all_reduce(loss.detach(), all.get_group(), c10d::ReduceOp::AVG));
    norms.push_back(clip_grad_norm_(nets.parameters(), kMaxNorm).tensor().clone());
    for (const at::Tensor& each : all_gather(norms.back().view({1}), all.get_group()).unbind()) {
      expect_equal(each, norms.back(), "norms of all ranks");
    }
    optimizer.step();
  }
  values.insert(values.end(), norms.begin(), norms.end());
  for (const at::Tensor& p : nets.parameters()) values.push_back(full(p.detach()).clone());
  return values;
}

TEST(MoeWithCutSequences, TrainsLikeOneProcess) {
  const std::vector<at::Tensor> expected = trained_alone();
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {kDataRanks, 2}, {"dp", "cp"}, {.group = group});
    for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
      const std::vector<at::Tensor> actual = trained(mesh, way);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-9, 1e-9)) << to_string(way) << ", value " << i;
      }
    }
  });
}

}  // namespace
}  // namespace serried::testing::moe_with_cut_sequences
