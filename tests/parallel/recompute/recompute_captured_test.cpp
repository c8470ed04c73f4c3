// Captured steps that recompute replay to the bits of the plain eager step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/recompute.h"
#include "serried/parallel/saved_sharded.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/random/random.h"
#include "tests/parallel/recompute/trained.h"
#include "tests/support/errors.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

struct CapturedNetImpl : torch::nn::Module {
  explicit CapturedNetImpl(double dropout_) : dropout(dropout_) {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
    models::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::dropout(norm(torch::gelu(up(x))), dropout, is_training()));
  }
  double dropout;
  torch::nn::Linear up{6, 8}, down{8, 6};
  torch::nn::BatchNorm1d norm{8};
};
TORCH_MODULE(CapturedNet);

using Forward = std::function<at::Tensor(CapturedNet&, const at::Tensor&)>;

at::Tensor plain_forward(CapturedNet& net, const at::Tensor& x) {
  return net(net(x));
}
at::Tensor recomputed_forward(CapturedNet& net, const at::Tensor& x) {
  return recompute(net, recompute(net, x));
}
at::Tensor nested_forward(CapturedNet& net, const at::Tensor& x) {
  return recompute([&](const at::Tensor& in) { return recompute(net, recompute(net, in)); }, x);
}

struct CapturedRun {
  std::vector<at::Tensor> state;  // losses, then parameters and buffers
  int64_t replays = 0;
};

CapturedRun train_captured_net(const Forward& forward, bool is_captured, double dropout) {
  CapturedNet net(dropout);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const auto eager = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    const at::Tensor loss = forward(net, x).square().mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
  auto captured = capture(eager);
  at::manual_seed(5);
  CapturedRun run;
  for (int step = 0; step < 7; ++step) {
    const at::Tensor x = models::values({5, 6}, step);
    run.state.push_back((is_captured ? captured(x) : eager(x)).clone());
  }
  run.replays = captured.replays();
  for (const at::Tensor& t : net->parameters()) run.state.push_back(t.detach());
  for (const at::Tensor& t : net->buffers()) run.state.push_back(t);
  return run;
}

void expect_same_runs(const CapturedRun& actual, const CapturedRun& expected) {
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (size_t i = 0; i < expected.state.size(); ++i) {
    expect_equal(actual.state[i], expected.state[i], std::to_string(i));
  }
}

TEST(RecomputeCaptured, StepsWithDropoutAndBatchNormAreThePlainEagerStep) {
  for (const double dropout : {0.0, 0.4}) {
    const CapturedRun plain = train_captured_net(plain_forward, false, dropout);
    expect_same_runs(train_captured_net(recomputed_forward, false, dropout), plain);
    const CapturedRun captured = train_captured_net(recomputed_forward, true, dropout);
    expect_same_runs(captured, plain);
    EXPECT_GE(captured.replays, 3);
    const CapturedRun nested = train_captured_net(nested_forward, true, dropout);
    expect_same_runs(nested, plain);
    EXPECT_GE(nested.replays, 3);
  }
}

struct CutNetImpl : torch::nn::Module {
  CutNetImpl(const DeviceMesh& mesh, double dropout_) : dropout(dropout_) {
    register_module("up", up);
    register_module("down", down);
    models::fill_parameters(*this);
    distribute_parameter(up->weight, mesh, {Shard(0)});
    distribute_parameter(up->bias, mesh, {Shard(0)});
    distribute_parameter(down->weight, mesh, {Shard(1)});
    distribute_module(*this, mesh);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = down(torch::dropout(torch::gelu(up(x)), dropout, is_training()));
    return x + DTensor(y).redistribute({Replicate()});
  }
  double dropout;
  torch::nn::Linear up{6, 10}, down{10, 6};
};
TORCH_MODULE(CutNet);

enum class Way { plain, recomputed, sharded };

CapturedRun train_cut_net(const DeviceMesh& mesh, Way way, bool is_captured, double dropout) {
  CutNet net(mesh, dropout);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const auto eager = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    at::Tensor y;
    {
      std::optional<SavedSharded> guard;
      if (way == Way::sharded) guard.emplace(mesh, 1, SavedShardedOptions{.min_bytes = 0});
      y = way == Way::recomputed ? recompute(net, recompute(net, x)) : net(net(x));
    }
    const at::Tensor loss = y.square().mean();
    loss.backward();
    optimizer.step();
    return DTensor(loss.detach()).full_tensor();
  };
  auto captured = capture(eager);
  manual_seed(5, mesh);
  CapturedRun run;
  for (int step = 0; step < 7; ++step) {
    const DTensor x = place(models::values({5, 6}, step), mesh, {Replicate()});
    run.state.push_back((is_captured ? captured(x) : eager(x)).clone());
  }
  run.replays = captured.replays();
  for (const at::Tensor& t : net->parameters()) run.state.push_back(full(t.detach()));
  return run;
}

TEST(RecomputeCaptured, StepsOfTensorParallelModelsAreThePlainEagerStep) {
  for (const double dropout : {0.0, 0.4}) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const CapturedRun plain = train_cut_net(mesh, Way::plain, false, dropout);
      for (const Way way : {Way::recomputed, Way::sharded}) {
        expect_same_runs(train_cut_net(mesh, way, false, dropout), plain);
        const CapturedRun captured = train_cut_net(mesh, way, true, dropout);
        expect_same_runs(captured, plain);
        EXPECT_GE(captured.replays, 3);
      }
    });
  }
}

TEST(RecomputeCaptured, StepsOfDistributedDataParallelAreThePlainEagerStep) {
  const auto train = [](const Group& group, bool recomputes, bool is_captured) {
    CapturedNet net(0.0);
    struct Holder : torch::nn::Module {
      Holder(CapturedNet net_, bool recomputes_) : net(register_module("net", net_)), recomputes(recomputes_) {}
      at::Tensor forward(const at::Tensor& x) { return recomputes ? recompute(net, x) : net(x); }
      CapturedNet net;
      bool recomputes;
    };
    DistributedDataParallel ddp(std::make_shared<Holder>(net, recomputes), {.process_group = group});
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    const auto eager = [&](const at::Tensor& x) {
      optimizer.zero_grad();
      const at::Tensor loss = ddp(x).square().mean();
      loss.backward();
      optimizer.step();
      return loss.detach();
    };
    auto captured = capture(eager);
    CapturedRun run;
    for (int step = 0; step < 7; ++step) {
      const at::Tensor x = models::values({5, 6}, 10 * step + group->getRank());
      run.state.push_back((is_captured ? captured(x) : eager(x)).clone());
    }
    run.replays = captured.replays();
    for (const at::Tensor& t : net->parameters()) run.state.push_back(t.detach());
    for (const at::Tensor& t : net->buffers()) run.state.push_back(t);
    return run;
  };
  run_ranks(2, [&](const Group& group) {
    const CapturedRun plain = train(group, false, false);
    expect_same_runs(train(group, true, false), plain);
    const CapturedRun captured = train(group, true, true);
    expect_same_runs(captured, plain);
    EXPECT_GE(captured.replays, 3);
  });
}

TEST(RecomputeCaptured, ADrawOfAForwardOutsideIsRefused) {
  const at::Tensor x = models::values({2, 3}, 1).requires_grad_();
  std::vector<at::Tensor> results;
  const auto forward = [&] {
    results = {recompute([](const at::Tensor& in) { return torch::dropout(in.exp(), 0.5, true); }, x).sum()};
  };
  auto backward = capture([&](const at::Tensor& unused) {
    results[0].backward();
    return unused + 1;
  });
  const auto steps = [&] {
    for (int call = 0; call < 3; ++call) {
      forward();
      backward(at::ones({1}));
    }
  };
  EXPECT_THAT(error_text<c10::NotImplementedError>(steps),
              ::testing::HasSubstr("[recompute] the forward drew random numbers outside of the captured function that "
                                   "runs its backward\n  fix: capture forward and backward as one function"));
}

}  // namespace
}  // namespace serried::testing
