// Writes to fully sharded parameters: through views, by a batch of one rank, by other names, between two passes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/parallel/recompute.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using namespace sharded;

NetPtr mlp(at::ScalarType dtype) {
  return make([] { return std::make_shared<Mlp>(); }, dtype);
}

void expect_same_parameters(const torch::nn::Module& net, const torch::nn::Module& plain) {
  const auto actual = values_of(net), expected = values_of(plain);
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str("parameter ", i));
}

// As padding rows are set to zero, and heads pruned.
void write_through_views(Net& net) {
  const at::NoGradGuard no_grad;
  auto& mlp = static_cast<Mlp&>(net);
  mlp.first->weight.select(0, 0).zero_();
  mlp.second->weight.narrow(1, 1, 2).mul_(0.5);
  mlp.second->weight.select(0, 1).copy_(mlp.second->weight.select(0, 2));
  mlp.third->weight.t().add_(mlp.head->bias.select(0, 0));
}

TEST(FullyShardWritten, AWriteThroughAViewKeepsThePrecisionOfTheRest) {
  for (const auto low : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    run_ranks(3, [&](const Group&) {
      const NetPtr net = mlp(at::kFloat), plain = mlp(at::kFloat);
      shard_all(*net, {.mixed_precision = {.param_dtype = low}});
      write_through_views(*plain);
      write_through_views(*net);
      expect_same_parameters(*net, *plain);
    });
  }
}

TEST(FullyShardWritten, TensorParallelPartsKeepThemToo) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    const auto make_layer = [] { return seeded(1, [] { return torch::nn::Linear(6, 8); }); };
    torch::nn::Linear layer = make_layer(), plain = make_layer();
    distribute_parameter(layer->weight, mesh["tp"], {Shard(0)});
    distribute_parameter(layer->bias, mesh["tp"], {Shard(0)});
    fully_shard(*layer, {.mesh = mesh["dp"], .mixed_precision = {.param_dtype = at::kBFloat16}});
    const at::NoGradGuard no_grad;
    for (const torch::nn::Linear& each : {layer, plain}) each->weight.narrow(1, 2, 3).mul_(0.5);
    expect_same_parameters(*layer, *plain);
  });
}

TEST(FullyShardWritten, TwoViewsInOneCallAreBothWritten) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = mlp(at::kDouble), plain = mlp(at::kDouble);
    shard_all(*net);
    const at::NoGradGuard no_grad;
    for (const NetPtr& each : {net, plain}) {
      const at::Tensor& w = each->as<Mlp>()->first->weight;
      at::_foreach_mul_({w.select(0, 0), w.select(0, 3)}, 2.0);
      at::_foreach_add_({w.select(0, 1), w.select(0, 2)}, at::TensorList({w.select(0, 2), w.select(0, 1)}));
    }
    expect_same_parameters(*net, *plain);
  });
}

struct Lookup : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  Lookup() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).max_norm(0.7)));
    table->to(at::kDouble);
  }
};

// Ranks look up different numbers of rows, the last one none.
at::Tensor rows_of(int64_t rank) {
  const std::vector<std::vector<int64_t>> rows = {{8, 1, 7}, {0, 2, 2, 6}, {}};
  return at::tensor(rows[size_t(rank) % 3], at::kLong);
}

TEST(FullyShardWritten, MaxNormShortensTheRowsOfAllRanks) {
  for (const Sizes& shape : {Sizes{1, 2}, Sizes{1, 3}, Sizes{2, 2}}) {
    run_ranks(int(shape[0] * shape[1]), [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", shape, {"replicate", "shard"}, {.group = group});
      const auto make_net = [] { return seeded(3, [] { return std::make_shared<Lookup>(); }); };
      const auto net = make_net(), plain = make_net();
      fully_shard(*net, {.mesh = mesh});
      net->table(rows_of(group->getRank())).square().sum().backward();
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (int r = 0; r < group->getSize(); ++r) {
        loss = loss + plain->table(rows_of(r)).square().sum() / double(group->getSize());
      }
      loss.backward();
      expect_same_parameters(*net, *plain);
      expect_close(full(net->table->weight.grad()), plain->table->weight.grad());
    });
  }
}

TEST(FullyShardWritten, MaxNormOfAViewDoesSo) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
    const auto make_net = [] { return seeded(3, [] { return std::make_shared<Lookup>(); }); };
    const auto net = make_net(), plain = make_net();
    fully_shard(*net, {.mesh = mesh});
    const at::NoGradGuard no_grad;
    const auto look_up = [](Lookup& in, int64_t rank) {
      const at::Tensor rows = at::tensor({rank, 4 - rank}, at::kLong);
      torch::nn::functional::embedding(rows, in.table->weight.narrow(0, 2, 5),
                                       torch::nn::functional::EmbeddingFuncOptions().max_norm(0.5));
    };
    look_up(*net, group->getRank());
    for (int r = 0; r < 4; ++r) look_up(*plain, r);
    expect_same_parameters(*net, *plain);
  });
}

TEST(FullyShardWritten, MaxNormIsRefusedInACapturedStep) {
  run_ranks(2, [](const Group& group) {
    const auto net = seeded(3, [] { return std::make_shared<Lookup>(); });
    fully_shard(*net);
    auto step = capture([&](const at::Tensor& rows) { return net->table(rows).sum(); });
    const std::string text = error_text<c10::NotImplementedError>([&] {
      for (int i = 0; i < 3; ++i) step(rows_of(group->getRank()));
    });
    EXPECT_THAT(text, ::testing::HasSubstr("[embedding_renorm_] which rows of a sharded table the ranks look up"));
    EXPECT_THAT(text, ::testing::HasSubstr("run this step eagerly, or build the Embedding without max_norm"));
  });
}

TEST(FullyShardWritten, PartsWrittenUnderAnyNameAreGatheredAgain) {
  for (const bool by_data : {false, true}) {
    run_ranks(2, [&](const Group&) {
      const NetPtr net = mlp(at::kDouble), plain = mlp(at::kDouble);
      shard_all(*net);
      const at::NoGradGuard no_grad;
      net->loss(1);
      for (const at::Tensor& p : net->parameters()) DTensor(by_data ? p.data() : p.detach()).to_local().mul_(0.5);
      for (at::Tensor& p : plain->parameters()) p.mul_(0.5);
      expect_close(net->loss(1), plain->loss(1));
    });
  }
}

// A bias is not saved by autograd, so nothing but the second run reads it again.
TEST(FullyShardWritten, ARecomputedSegmentRefusesParametersThatHaveChanged) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = mlp(at::kDouble);
    shard_all(*net);
    auto& first = net->as<Mlp>()->first;
    const at::Tensor loss =
        recompute([&](const at::Tensor& x) { return torch::tanh(first(x)); }, net->input({6, 5}, 1)).square().mean();
    {
      const at::NoGradGuard no_grad;
      first->bias.add_(1.0);
    }
    EXPECT_THAT(error_text<c10::Error>([&] { loss.backward(); }),
                ::testing::HasSubstr("a tensor that the function reads, f64[7] has been changed by an in-place "
                                     "operation since the forward"));
  });
}

}  // namespace
}  // namespace serried::testing
