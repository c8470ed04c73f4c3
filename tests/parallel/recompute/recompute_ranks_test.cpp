// recompute with DTensors and DistributedDataParallel, whose collectives run again in backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/recompute.h"
#include "serried/parallel/sync_batchnorm.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/random/random.h"
#include "tests/parallel/recompute/trained.h"
#include "tests/support/errors.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

struct TallImpl : torch::nn::Module {
  explicit TallImpl(double dropout_, at::ScalarType dtype = at::kDouble) : dropout(dropout_) {
    register_module("up", up);
    register_module("down", down);
    models::fill_parameters(*this);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::dropout(down(torch::dropout(torch::gelu(up(x)), dropout, is_training())), dropout, is_training());
  }
  double dropout;
  torch::nn::Linear up{6, 10}, down{10, 6};
};
TORCH_MODULE(Tall);

Tall cut_tall(const DeviceMesh& mesh, double dropout, at::ScalarType dtype) {
  Tall net(dropout, dtype);
  distribute_parameter(net->up->weight, mesh, {Shard(0)});
  distribute_parameter(net->up->bias, mesh, {Shard(0)});
  distribute_parameter(net->down->weight, mesh, {Shard(1)});
  distribute_module(*net, mesh);
  return net;
}

std::vector<at::Tensor> whole_gradients(Tall& net, const DTensor& x, const std::function<at::Tensor()>& forward) {
  net->zero_grad();
  at::Tensor(x).mutable_grad().reset();
  manual_seed(7, x.device_mesh());
  const at::Tensor y = forward();
  y.square().sum().backward();
  std::vector<at::Tensor> all{full(y.detach()), full(x.grad())};
  for (const at::Tensor& p : net->parameters()) all.push_back(full(p.grad()));
  return all;
}

DTensor whole_input(const DeviceMesh& mesh, at::ScalarType dtype) {
  return DTensor(at::Tensor(place(models::values({5, 6}, 1).to(dtype), mesh, {Replicate()})).requires_grad_());
}

TEST(RecomputeRanks, TensorParallelWithDropoutIsThePlainRunBitForBit) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        Tall net = cut_tall(mesh, 0.3, dtype);
        const DTensor x = whole_input(mesh, dtype);
        const auto plain = whole_gradients(net, x, [&] { return net(net(x)); });
        const auto again = whole_gradients(net, x, [&] { return recompute(net, recompute(net, x)); });
        ASSERT_EQ(again.size(), plain.size());
        for (size_t i = 0; i < plain.size(); ++i) expect_equal(again[i], plain[i], std::to_string(i));
        const auto nested = whole_gradients(
            net, x, [&] { return recompute([&](const at::Tensor& in) { return recompute(net, net(in)); }, x); });
        for (size_t i = 0; i < plain.size(); ++i) expect_equal(nested[i], plain[i], std::to_string(i));
      });
    }
  }
}

TEST(RecomputeRanks, TheSecondRunLeavesOutTheCollectivesAtItsEnd) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Tall net = cut_tall(mesh, 0, at::kDouble);
    const DTensor x = whole_input(mesh, at::kDouble);
    const auto block = [&](const at::Tensor& in) {
      return at::Tensor(DTensor(net->down(torch::gelu(net->up(in)))).redistribute({Replicate()}));
    };
    const auto count = [&](auto forward) {
      CommDebugMode comm;
      whole_gradients(net, x, [&] { return at::Tensor(forward(x)); });
      return comm.count("all_reduce");
    };
    const auto plain = count(block);
    EXPECT_GT(plain, 0);
    EXPECT_EQ(count([&](const at::Tensor& in) { return recompute(block, in); }), plain);
  });
}

TEST(RecomputeRanks, PlainDrawsOfRankThreadsAreRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = models::values({2, 3}, 1).requires_grad_();
    const auto drops = [](const at::Tensor& in) { return torch::dropout(in, 0.5, true).exp(); };
    EXPECT_THAT(error_text<c10::ValueError>([&] { recompute(drops, x); }),
                HasSubstr("[recompute] aten::bernoulli_ draws from torch's generator, which all rank threads share: no "
                          "second run can draw the same numbers\n"
                          "  fix: run ranks as processes, draw for DTensors, or pass a generator of this rank"));
    EXPECT_NO_THROW(recompute([](const at::Tensor& in) { return torch::dropout(in, 0.5, false).exp(); }, x));
    const at::Tensor q = models::values({1, 2, 4, 8}, 1).requires_grad_();
    const auto attends = [](const at::Tensor& in) { return at::scaled_dot_product_attention(in, in, in); };
    recompute(attends, q).sum().backward();
    expect_equal(q.grad(), torch::autograd::grad({attends(q).sum()}, {q}).at(0));
    at::Generator own = at::detail::createCPUGenerator(uint64_t(mesh.get_rank()));
    const auto noisy = [&](const at::Tensor& in) { return (in * at::rand({3}, own)).exp(); };
    own.set_current_seed(4);
    const at::Tensor plain = torch::autograd::grad({noisy(x).sum()}, {x}).at(0);
    own.set_current_seed(4);
    expect_equal(torch::autograd::grad({recompute(noisy, x).sum()}, {x}).at(0), plain);
  });
}

// Attention whose heads are cut over the ranks.
struct CutAttentionImpl : torch::nn::Module {
  explicit CutAttentionImpl(const DeviceMesh& mesh) {
    for (const auto& [name, linear] : {std::pair("q", q), {"k", k}, {"v", v}, {"out", out}}) {
      register_module(name, linear);
    }
    register_module("norm", norm);
    models::fill_parameters(*this);
    to(at::kDouble);
    for (const torch::nn::Linear& linear : {q, k, v}) {
      distribute_parameter(linear->weight, mesh, {Shard(0)});
      distribute_parameter(linear->bias, mesh, {Shard(0)});
    }
    distribute_parameter(out->weight, mesh, {Shard(1)});
    distribute_module(*this, mesh);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm(x);
    const auto heads = [](const at::Tensor& t) { return t.view({t.size(0), t.size(1), 4, 2}).transpose(1, 2); };
    const at::Tensor mixed = at::scaled_dot_product_attention(heads(q(y)), heads(k(y)), heads(v(y)), {}, 0.0, true);
    return x + out(mixed.transpose(1, 2).contiguous().view(x.sizes()));
  }
  torch::nn::Linear q{8, 8}, k{8, 8}, v{8, 8}, out{8, 8};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
};
TORCH_MODULE(CutAttention);

TEST(RecomputeRanks, AttentionWithCutHeadsIsThePlainRunBitForBit) {
  for (const int64_t ranks : {1, 2, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      CutAttention net(mesh);
      const at::Tensor x =
          at::Tensor(place(models::values({2, 3, 8}, 1).to(at::kDouble), mesh, {Replicate()})).requires_grad_();
      std::vector<std::vector<at::Tensor>> runs;
      for (const bool recomputes : {false, true}) {
        net->zero_grad();
        x.mutable_grad().reset();
        const at::Tensor y = recomputes ? recompute(net, recompute(net, x)) : net(net(x));
        y.square().sum().backward();
        auto& all = runs.emplace_back(std::vector<at::Tensor>{full(y.detach()), full(x.grad())});
        for (const at::Tensor& p : net->parameters()) all.push_back(full(p.grad()));
      }
      ASSERT_EQ(runs[1].size(), 12);
      for (size_t i = 0; i < 12; ++i) expect_equal(runs[1][i], runs[0][i], std::to_string(i));
    });
  }
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    register_module("linear", linear);
    register_module("norm", norm);
    models::fill_parameters(*this);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)).tanh(); }
  torch::nn::Linear linear{6, 4};
  torch::nn::BatchNorm1d norm{4};
};
TORCH_MODULE(Normed);

std::vector<at::Tensor> whole_buffers(Normed& net) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& t : net->buffers()) all.push_back(full(t));
  for (const at::Tensor& t : net->parameters()) all.push_back(full(t.grad()));
  return all;
}

TEST(RecomputeRanks, BatchNormOfDTensorsMovesItsRunningStatisticsOnce) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    Normed plain, net;
    distribute_module(*plain, mesh);
    distribute_module(*net, mesh);
    for (int step = 0; step < 3; ++step) {
      const DTensor x = place(models::values({7, 6}, step).to(at::kDouble), mesh, {Shard(0)});
      plain(x).square().sum().backward();
      recompute(net, at::Tensor(x)).square().sum().backward();
      const auto expected = whole_buffers(plain), actual = whole_buffers(net);
      ASSERT_EQ(actual.size(), 7);
      for (size_t i = 0; i < expected.size(); ++i) expect_equal(actual[i], expected[i], std::to_string(i));
    }
  });
}

TEST(RecomputeRanks, SyncBatchNormMovesItsRunningStatisticsOnce) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Normed plain, net;
    convert_sync_batchnorm(*plain, mesh.get_group());
    convert_sync_batchnorm(*net, mesh.get_group());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = models::values({3 + mesh.get_rank(), 6}, step).to(at::kDouble);
      plain(x).square().sum().backward();
      recompute(net, x).square().sum().backward();
      const auto expected = whole_buffers(plain), actual = whole_buffers(net);
      ASSERT_EQ(actual.size(), 7);
      for (size_t i = 0; i < expected.size(); ++i) expect_equal(actual[i], expected[i], std::to_string(i));
    }
  });
}

// Two blocks, each recomputed or not, and one that only odd steps use.
struct StackedImpl : torch::nn::Module {
  explicit StackedImpl(bool recomputes_) : recomputes(recomputes_) {
    register_module("first", first);
    register_module("second", second);
    register_module("sometimes", sometimes);
    models::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool uses_all) {
    const auto run = [&](Tall& block, const at::Tensor& in) { return recomputes ? recompute(block, in) : block(in); };
    const at::Tensor y = run(second, run(first, x));
    return uses_all ? run(sometimes, y) : y;
  }
  bool recomputes;
  Tall first{0.0, at::kFloat}, second{0.0, at::kFloat}, sometimes{0.0, at::kFloat};
};
TORCH_MODULE(Stacked);

// The parameters after some steps, of which every second one is preceded by one without synchronisation.
std::vector<at::Tensor> train_stacked(bool recomputes, DDPOptions options, const Group& group) {
  Stacked net(recomputes);
  options.process_group = group;
  const bool finds = options.find_unused_parameters;
  DistributedDataParallel ddp(net, std::move(options));
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    const bool uses_all = !finds || (step + group->getRank()) % 2 == 0;
    optimizer.zero_grad();
    if (step % 2 == 1 && !finds) {
      const auto guard = ddp.no_sync();
      ddp(models::values({3, 6}, 20 + step), uses_all).square().mean().backward();
    }
    ddp(models::values({3, 6}, 10 * step + group->getRank()), uses_all).square().mean().backward();
    optimizer.step();
  }
  return net->parameters();
}

TEST(RecomputeRanks, DistributedDataParallelTrainsThePlainModelBitForBit) {
  for (const DDPOptions& options :
       {DDPOptions{}, DDPOptions{.find_unused_parameters = true}, DDPOptions{.static_graph = true}}) {
    run_ranks(2, [&](const Group& group) {
      DDPOptions chosen = options;
      const auto plain = train_stacked(false, chosen, group);
      const auto again = train_stacked(true, chosen, group);
      ASSERT_EQ(again.size(), 12);
      for (size_t i = 0; i < plain.size(); ++i) expect_equal(again[i], plain[i], std::to_string(i));
    });
  }
}

TEST(RecomputeRanks, DistributedDataParallelInsideOfASegmentIsRefused) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(Tall(0.0, at::kFloat), {.process_group = group});
    const at::Tensor x = models::values({3, 6}, 1);
    EXPECT_THAT(error_text<c10::ValueError>([&] { recompute([&](const at::Tensor& in) { return ddp(in); }, x); }),
                HasSubstr("[DistributedDataParallel] forward was called inside of recompute\n"
                          "  fix: call recompute inside of the module's forward, on its blocks"));
  });
}

TEST(RecomputeRanks, LowPrecisionOfDistributedDataParallelHoldsInTheSecondRun) {
  run_ranks(2, [](const Group& group) {
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool recomputes : {false, true}) {
      Stacked net(recomputes);
      DDPOptions options{.process_group = group};
      options.mixed_precision.param_dtype = at::kBFloat16;
      DistributedDataParallel ddp(net, options);
      for (int step = 0; step < 2; ++step) {
        ddp(models::values({3, 6}, 10 * step + group->getRank()), true).square().mean().backward();
      }
      auto& all = gradients.emplace_back();
      for (const at::Tensor& p : net->parameters()) all.push_back(p.grad().clone());
    }
    ASSERT_EQ(gradients[1].size(), 12);
    for (size_t i = 0; i < 12; ++i) expect_equal(gradients[1][i], gradients[0][i], std::to_string(i));
  });
}

}  // namespace
}  // namespace serried::testing
