// Containers and transformers of torch::nn, cut by styles, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing {
namespace {

namespace nn = torch::nn;

template <class Net>
Net twin(const std::function<Net()>& make) {
  Net net = seeded(7, make);
  net->to(at::kDouble);
  return net;
}

at::Tensor input(at::IntArrayRef sizes, uint64_t seed = 8) {
  return seeded(seed, [&] { return torch::randn(sizes, at::kDouble); });
}

TEST(StockModules, SequentialOfAnyModules) {
  const std::function<nn::Sequential()> make = [] {
    return nn::Sequential(nn::AnyModule(nn::Linear(5, 8)), nn::AnyModule(nn::GELU()), nn::AnyModule(nn::Linear(8, 5)),
                          nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({5}))));
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    nn::Sequential whole = twin(make), net = twin(make);
    parallelize_module(*net, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    const at::Tensor x = input({3, 4, 5});
    whole->forward(x).square().sum().backward();
    const at::Tensor y = net->forward(x);
    expect_close(full(y), whole->forward(x));
    y.square().sum().backward();
    gpt::expect_gradients_of(*whole, *net);
  });
}

TEST(StockModules, SelfAttentionByHeads) {
  const std::function<nn::MultiheadAttention()> make = [] {
    return nn::MultiheadAttention(nn::MultiheadAttentionOptions(12, 4));
  };
  for (int64_t ranks : {1, 2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      nn::MultiheadAttention whole = twin(make), net = twin(make);
      parallelize_module(*net, mesh, {{"", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
      const at::Tensor x = input({5, 3, 12});
      const auto [expected, expected_weights] = whole->forward(x, x, x);
      expected.square().sum().backward();
      const DTensor dx = DTensor::from_local(x, mesh, {Replicate()});
      const auto [y, weights] = net->forward(dx, dx, dx);
      expect_close(full(y), expected);
      expect_close(full(weights), expected_weights);
      y.square().sum().backward();
      gpt::expect_gradients_of(*whole, *net);
      expect_close(full(std::get<0>(net->forward(x, x, x))), expected, "of a plain tensor");
    });
  }
}

TEST(StockModules, CrossAttention) {
  const std::function<nn::MultiheadAttention()> make = [] {
    return nn::MultiheadAttention(nn::MultiheadAttentionOptions(12, 4));
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    nn::MultiheadAttention whole = twin(make), net = twin(make);
    parallelize_module(*net, mesh, {{"", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
    const at::Tensor x = input({5, 3, 12}), memory = input({4, 3, 12}, 9);
    std::get<0>(whole->forward(x, memory, memory)).square().sum().backward();
    const DTensor dx = DTensor::from_local(x, mesh, {Replicate()});
    const DTensor dm = DTensor::from_local(memory, mesh, {Replicate()});
    std::get<0>(net->forward(dx, dm, dm)).square().sum().backward();
    gpt::expect_gradients_of(*whole, *net);
  });
}

ParallelPlan encoder_plan(const std::string& prefix) {
  return {{prefix + "self_attn", ColwiseParallel()},
          {prefix + "self_attn.out_proj", RowwiseParallel()},
          {prefix + "linear1", ColwiseParallel()},
          {prefix + "linear2", RowwiseParallel()}};
}

TEST(StockModules, TransformerEncoderLayer) {
  const std::function<nn::TransformerEncoderLayer()> make = [] {
    return nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(12, 4).dim_feedforward(16).dropout(0));
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    nn::TransformerEncoderLayer whole = twin(make), net = twin(make);
    parallelize_module(*net, mesh, encoder_plan(""));
    const at::Tensor x = input({5, 3, 12});
    whole->forward(x).square().sum().backward();
    const at::Tensor y = net->forward(DTensor::from_local(x, mesh, {Replicate()}));
    expect_close(full(y), whole->forward(x));
    y.square().sum().backward();
    gpt::expect_gradients_of(*whole, *net);
  });
}

TEST(StockModules, TransformerWithMasks) {
  const std::function<nn::Transformer()> make = [] {
    return nn::Transformer(nn::TransformerOptions(12, 4, 1, 1).dim_feedforward(16).dropout(0));
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    nn::Transformer whole = twin(make), net = twin(make);
    ParallelPlan plan = encoder_plan("encoder.layers.*.");
    for (const auto& [pattern, style] : encoder_plan("decoder.layers.*.")) plan.push_back({pattern, style});
    plan.push_back({"decoder.layers.*.multihead_attn", ColwiseParallel()});
    plan.push_back({"decoder.layers.*.multihead_attn.out_proj", RowwiseParallel()});
    parallelize_module(*net, mesh, plan);
    const at::Tensor source = input({5, 3, 12}), target = input({4, 3, 12}, 9);
    const at::Tensor mask = nn::TransformerImpl::generate_square_subsequent_mask(4).to(at::kDouble);
    const at::Tensor expected = whole->forward(source, target, {}, mask);
    expected.square().sum().backward();
    const auto on = [&](const at::Tensor& t) { return DTensor::from_local(t, mesh, {Replicate()}); };
    const at::Tensor y = net->forward(on(source), on(target), {}, on(mask));
    expect_close(full(y), expected);
    y.square().sum().backward();
    gpt::expect_gradients_of(*whole, *net);
  });
}

}  // namespace
}  // namespace serried::testing
