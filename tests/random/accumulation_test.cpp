// Random accumulations under capture: gradients are dropped, zeroed, scaled and replaced inside of calls and between
// them. All a call leaves is that of the same function uncaptured, or the function is refused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <atomic>
#include <iostream>
#include <memory>
#include <random>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/random_programs.h"

namespace serried::testing {
namespace {

enum class ActKind { backward, zero, step, scale };

/// One thing that a program does to its gradients.
struct Act {
  ActKind kind;
  int how;
  int first, stride;  // parameters: each, or each second one
};

enum class Strategy { plain, ddp, dtensor };

struct AccumulationProgram {
  Strategy strategy;
  int num_ranks;
  bool as_view;  // gradients lie in DDP's buckets
  int optimizer;
  std::vector<Act> inside;
  std::vector<std::vector<Act>> outside;  // after a call, in turn
};

Act draw_act(std::mt19937_64& dice) {
  const int stride = 1 + int(dice() % 2);
  return {ActKind(dice() % 4), int(dice() % 10), int(dice() % uint64_t(stride)), stride};
}

AccumulationProgram draw_accumulation(uint64_t seed) {
  std::mt19937_64 dice(seed);
  AccumulationProgram p{Strategy(dice() % 3), 1 + int(dice() % 3), dice() % 2 == 0, int(dice() % 4), {}, {}};
  if (p.strategy == Strategy::plain) p.num_ranks = 1;
  for (uint64_t i = 1 + dice() % 5; i > 0; --i) p.inside.push_back(draw_act(dice));
  p.inside.insert(p.inside.begin() + int64_t(dice() % (p.inside.size() + 1)), Act{ActKind::backward, 0, 0, 1});
  p.outside.resize(1 + dice() % 3);
  for (std::vector<Act>& acts : p.outside) {
    for (uint64_t i = dice() % 3; i > 0; --i) acts.push_back(draw_act(dice));
    // The next call begins where this one ended.
    std::erase_if(acts, [](const Act& act) { return act.kind == ActKind::backward; });
  }
  return p;
}

/// A model, and all that acts on it.
class Accumulation {
 public:
  Accumulation(const AccumulationProgram& program, const Group& group) : program_(program), group_(group) {
    if (program.strategy == Strategy::dtensor) distribute();
    if (program.strategy == Strategy::ddp) {
      ddp_ = std::make_unique<Ddp>(
          net_, DistributedDataParallelOptions{.process_group = group, .gradient_as_bucket_view = program.as_view});
    }
    optimizer_ = make_optimizer();
  }

  at::Tensor run(const std::vector<Act>& acts, const at::Tensor& x) {
    at::Tensor loss = torch::zeros({});
    for (const Act& act : acts) {
      if (act.kind == ActKind::backward) loss = backward(x * (1 + act.how % 3));
      if (act.kind == ActKind::zero) zero(act);
      if (act.kind == ActKind::step) optimizer_->step();
      if (act.kind == ActKind::scale) each(act, scale_gradient);
    }
    return loss;
  }

  /// Copies of this rank's parameters and gradients.
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& parameter : net_->parameters()) {
      tensors.push_back(part(parameter).detach().clone());
      tensors.push_back(parameter.grad().defined() ? part(parameter.grad()).detach().clone() : at::Tensor());
    }
    return tensors;
  }

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  static at::Tensor part(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).to_local() : t; }

 private:
  using Ddp = DistributedDataParallel<torch::nn::Sequential>;

  void distribute() {
    mesh_ = init_device_mesh("cpu", {group_->getSize()}, {"tp"}, {.group = group_});
    for (at::Tensor& parameter : net_->parameters()) {
      distribute_parameter(parameter, *mesh_, {parameter.dim() > 1 ? Placement(Shard(0)) : Placement(Replicate())});
    }
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() {
    using namespace torch::optim;
    const std::vector<at::Tensor> parameters = net_->parameters();
    const SGDOptions sgd = SGDOptions(1e-3).momentum(0.9);
    if (program_.optimizer == 0) return std::make_unique<torch::optim::SGD>(parameters, sgd);
    if (program_.optimizer == 1) return std::make_unique<serried::SGD>(parameters, SGDOptions(sgd).nesterov(true));
    if (program_.optimizer == 2) return std::make_unique<serried::AdamW>(parameters, AdamWOptions(1e-3));
    return std::make_unique<RMSprop>(parameters, RMSpropOptions(1e-3));
  }

  at::Tensor backward(const at::Tensor& x) {
    at::Tensor y;
    if (mesh_) {
      const at::Tensor input = DTensor::from_local(x, *mesh_, {Replicate()});
      y = net_->forward(input);
    } else {
      y = ddp_ ? (*ddp_)(x) : net_->forward(x);
    }
    const at::Tensor loss = y.square().mean();
    loss.backward();
    return part(loss.detach());
  }

  template <class Fn>
  void each(const Act& act, Fn fn) {
    const std::vector<at::Tensor> parameters = net_->parameters();
    for (size_t i = size_t(act.first); i < parameters.size(); i += size_t(act.stride)) {
      fn(parameters[i], parameters[i].mutable_grad(), act.how);
    }
  }

  void zero(const Act& act) {
    if (act.how < 2) return optimizer_->zero_grad(/*set_to_none=*/act.how == 0);
    if (act.how < 4) return net_->zero_grad(/*set_to_none=*/act.how == 2);
    each(act, zero_gradient);
  }

  static void zero_gradient(const at::Tensor& parameter, at::Tensor& grad, int how) {
    if (how == 4) grad = at::Tensor();
    if (how == 5) grad = torch::zeros_like(parameter);
    if (!grad.defined()) return;
    if (how == 6) grad.zero_();
    if (how == 7) grad.detach_().zero_();
    if (how == 8) grad.mul_(0);
    if (how == 9) grad.fill_(0);
  }

  static void scale_gradient(const at::Tensor&, at::Tensor& grad, int how) {
    if (!grad.defined()) return;
    const at::NoGradGuard no_grad;
    if (how < 5) grad.mul_(0.5);
    if (how == 5 || how == 6) grad = grad * 0.5;
    if (how == 7) grad = grad.clone();
    if (how == 8) grad = grad.detach();
  }

  const AccumulationProgram& program_;
  Group group_;
  torch::nn::Sequential net_ = seeded(
      1, [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3)); });
  std::optional<DeviceMesh> mesh_;
  std::unique_ptr<Ddp> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

struct AccumulationTally {
  std::atomic<int64_t> calls = 0, replays = 0, refusals = 0;
};

void expect_same_numbers(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (!expected[i].defined()) continue;
    // No tolerance, but NaN is itself.
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 0, 0, /*equal_nan=*/true)) << i;
  }
}

void run_accumulation(const AccumulationProgram& program, const Group& group, AccumulationTally& tally) {
  Accumulation eager(program, group), captured(program, group);
  auto step = capture([&](const at::Tensor& x) { return captured.run(program.inside, x); },
                      {.optimizers = {&captured.optimizer()}});
  const int shift = program.strategy == Strategy::ddp ? group->getRank() : 0;
  for (size_t i = 0; i < 16 && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(c10::str("call ", i));
    const at::Tensor x = seeded(10 * i + uint64_t(shift), [] { return torch::randn({4, 5}); });
    ++tally.calls;
    const at::Tensor expected = eager.run(program.inside, x);
    try {
      expect_same_numbers({step(x)}, {expected});
    } catch (const graph::CaptureError&) {
      ++tally.refusals;
      break;
    }
    expect_same_numbers(captured.state(), eager.state());
    for (Accumulation* each : {&eager, &captured}) each->run(program.outside[i % program.outside.size()], x);
  }
  tally.replays += step.replays();
}

TEST(RandomAccumulation, EqualsTheUncapturedFunctionOrIsRefused) {
  AccumulationTally tally;
  for_random_programs(150, [&](uint64_t seed) {
    const AccumulationProgram program = draw_accumulation(seed);
    run_ranks(program.num_ranks, [&](const Group& group) { run_accumulation(program, group, tally); },
              {.timeout = std::chrono::seconds(20)});
  });
  std::cout << tally.calls << " calls, " << tally.replays << " replays, " << tally.refusals << " refusals" << std::endl;
  EXPECT_GT(tally.replays, tally.calls / 2);
  EXPECT_LT(tally.refusals, tally.calls / 100);
}

}  // namespace
}  // namespace serried::testing
