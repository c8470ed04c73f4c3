// Fifty captured steps end bit for bit where fifty eager ones do: optimizers, data parallel, tensor parallel, dropout.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"

namespace serried {
namespace {

constexpr int kFiftySteps = 50;
constexpr int64_t kWidth = 8, kHeads = 2, kLength = 5;

/// A block of a GPT with dropout; heads may be cut over ranks.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm1", norm1);
    register_module("query", query);
    register_module("key", key);
    register_module("value", value);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({batch, kLength, kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const at::Tensor normed = norm1(x);
    const at::Tensor mixed = at::scaled_dot_product_attention(heads(query(normed)), heads(key(normed)),
                                                              heads(value(normed)), {}, 0.0, /*is_causal=*/true);
    at::Tensor y = x + out(mixed.transpose(1, 2).reshape({batch, kLength, kWidth}));
    return y + torch::dropout(down(torch::gelu(up(norm2(y)))), 0.2, is_training());
  }
  torch::nn::LayerNorm norm1{torch::nn::LayerNormOptions({kWidth})}, norm2{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear query{kWidth, kWidth}, key{kWidth, kWidth}, value{kWidth, kWidth}, out{kWidth, kWidth},
      up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
};
TORCH_MODULE(Block);

void cut_columns(torch::nn::Linear& linear, const DeviceMesh& mesh) {
  distribute_parameter(linear->weight, mesh, {Shard(0)});
  distribute_parameter(linear->bias, mesh, {Shard(0)});
}

void cut_rows(torch::nn::Linear& linear, const DeviceMesh& mesh) {
  distribute_parameter(linear->weight, mesh, {Shard(1)});
  distribute_parameter(linear->bias, mesh, {Replicate()});
}

void cut_block(Block& block, const DeviceMesh& mesh) {
  for (auto* linear : {&block->query, &block->key, &block->value, &block->up}) cut_columns(*linear, mesh);
  for (auto* linear : {&block->out, &block->down}) cut_rows(*linear, mesh);
  distribute_module(*block, mesh);
}

using Parameters = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;

const std::vector<std::pair<const char*, MakeOptimizer>>& optimizers() {
  static const std::vector<std::pair<const char*, MakeOptimizer>> all = {
      {"torch::optim::SGD",
       [](const Parameters& p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05)); }},
      {"torch::optim::SGD with momentum",
       [](const Parameters& p) {
         return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9));
       }},
      {"SGD",
       [](const Parameters& p) { return std::make_unique<SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9)); }},
      {"AdamW", [](const Parameters& p) { return std::make_unique<AdamW>(p, torch::optim::AdamWOptions(1e-2)); }},
  };
  return all;
}

/// Where a training ends: losses of all steps, then parameters.
struct End {
  std::vector<at::Tensor> losses, parameters;
  int64_t replays = 0;
};

at::Tensor local_part(const at::Tensor& t) {
  return dtensor_meta(t) != nullptr ? dtensor_meta(t)->local : t;
}

/// `forward` gives the loss of a batch; a scheduler halves the rate of our own optimizers every 20 steps.
template <class Forward>
End train(Block& block, const MakeOptimizer& make_optimizer, bool is_captured, Forward forward, int salt) {
  const auto optimizer = make_optimizer(block->parameters());
  const bool reads_rate = dynamic_cast<torch::optim::SGD*>(optimizer.get()) == nullptr;
  torch::optim::StepLR scheduler(*optimizer, 20, reads_rate ? 0.5 : 1.0);
  const auto eager = [&](const at::Tensor& x) {
    optimizer->zero_grad();
    at::Tensor loss = forward(x);
    loss.backward();
    optimizer->step();
    return loss;
  };
  auto captured = capture(eager);
  End end;
  for (int i = 0; i < kFiftySteps; ++i) {
    const at::Tensor x = seeded(1000 * salt + i, [] { return at::randn({3, kLength, kWidth}); });
    end.losses.push_back(local_part(is_captured ? captured(x) : eager(x)).clone());
    scheduler.step();
  }
  for (const at::Tensor& parameter : block->parameters()) end.parameters.push_back(local_part(parameter).clone());
  end.replays = captured.replays();
  return end;
}

void expect_same_end(const End& eager, const End& captured, const char* optimizer) {
  EXPECT_GE(captured.replays, kFiftySteps - 5) << optimizer;
  for (int i = 0; i < kFiftySteps; ++i) EXPECT_TRUE(at::equal(eager.losses[i], captured.losses[i])) << optimizer << i;
  for (size_t i = 0; i < eager.parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.parameters[i], captured.parameters[i])) << optimizer << ", parameter " << i;
  }
}

Block seeded_block() {
  return seeded(5, [] { return Block(); });
}

TEST(CapturedTraining, OfABlockIsThatOfEagerForFiftySteps) {
  for (const auto& [name, make_optimizer] : optimizers()) {
    const auto run = [&, &make = make_optimizer](bool is_captured) {
      Block block = seeded_block();
      torch::manual_seed(2);  // of the dropout
      // Batches are seeded, so the dropout draws from a state that is the same in both runs.
      return train(
          block, make, is_captured, [&](const at::Tensor& x) { return block(x).square().mean(); }, 0);
    };
    expect_same_end(run(false), run(true), name);
  }
}

TEST(CapturedTraining, InDataParallelIsThatOfEagerForFiftySteps) {
  run_ranks(2, [](const Group& group) {
    for (const auto& [name, make_optimizer] : optimizers()) {
      const auto run = [&, &make = make_optimizer](bool is_captured) {
        Block block = seeded_block();
        block->eval();  // rank threads share torch's generator, so dropout would differ from run to run
        DistributedDataParallel ddp(block, {.process_group = group});
        return train(
            block, make, is_captured, [&](const at::Tensor& x) { return ddp(x).square().mean(); }, group->getRank());
      };
      expect_same_end(run(false), run(true), name);
    }
  });
}

TEST(CapturedTraining, InTensorParallelIsThatOfEagerForFiftySteps) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    for (const auto& [name, make_optimizer] : optimizers()) {
      const auto run = [&, &make = make_optimizer](bool is_captured) {
        Block block = seeded_block();
        cut_block(block, mesh);
        manual_seed(3, mesh);
        const auto forward = [&](const at::Tensor& x) {
          return block(DTensor::from_local(x, mesh, {Replicate()})).square().mean();
        };
        return train(block, make, is_captured, forward, 0);
      };
      expect_same_end(run(false), run(true), name);
    }
  });
}

TEST(Training, CapturedStepsAreCountedForThoseWhoLookFromOutside) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net(4, 3);
    DistributedDataParallel ddp(net, {.process_group = group});
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad();
      at::Tensor loss = ddp(x).sum();
      loss.backward();
      return loss;
    });
    for (int i = 0; i < 9; ++i) step(at::ones({2, 4}));
    EXPECT_GT(step.replays(), 0);
    EXPECT_EQ(detail::as_own(*group->getDefaultBackend())->page()->num_steps, 9u);
  });
}

}  // namespace
}  // namespace serried
