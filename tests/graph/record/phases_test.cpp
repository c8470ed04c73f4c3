// Each recorded op is part of forward, backward or the optimizer, or counts as other; passes keep that.
#include "serried/graph/record/phases.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>

#include "serried/graph/capture.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/serialize.h"
#include "serried/graph/text/text.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "serried/tensor/making/modules.h"
#include "tests/graph/text/sample_graph.h"
#include "tests/support/fake_group.h"

namespace serried::graph {
namespace {

using serried::testing::fake_group;
using serried::testing::op_named;
using Step = std::function<at::Tensor(const at::Tensor&)>;

// "forward backward optimizer": phases in order, each once per row of its ops.
std::string course_of(const Graph& graph) {
  std::string course;
  std::string_view last;
  for (const Node& node : graph.nodes()) {
    if (phase_name(node.phase) == last) continue;
    last = phase_name(node.phase);
    course += (course.empty() ? "" : " ") + std::string(last);
  }
  return course;
}

Graph graph_of(const Step& fn, CaptureOptions options = {.passes = {}}, c10::IntArrayRef shape = {4, 5}) {
  auto step = capture(fn, std::move(options));
  for (int i = 0; i < 10 && step.replays() == 0; ++i) step(at::rand(shape));
  EXPECT_GT(step.replays(), 0);
  return step.graph();
}

struct Trained {
  torch::nn::Sequential net{torch::nn::Linear(5, 7), torch::nn::ReLU(), torch::nn::Linear(7, 3)};

  at::Tensor loss(const at::Tensor& x) { return net->forward(x).square().mean(); }

  Step step_of(torch::optim::Optimizer& optimizer) {
    return [this, &optimizer](const at::Tensor& x) {
      optimizer.zero_grad();
      at::Tensor loss_of_x = loss(x);
      loss_of_x.backward();
      optimizer.step();
      return loss_of_x;
    };
  }
};

TEST(GraphPhases, FollowEachOtherInATrainingStepOfAnyOptimizer) {
  using namespace torch::optim;
  Trained t;
  const auto parameters = t.net->parameters();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  optimizers.push_back(std::make_unique<torch::optim::SGD>(parameters, SGDOptions(0.1)));
  optimizers.push_back(
      std::make_unique<torch::optim::SGD>(parameters, SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true)));
  optimizers.push_back(std::make_unique<torch::optim::RMSprop>(parameters, RMSpropOptions(0.1).momentum(0.5)));
  optimizers.push_back(std::make_unique<serried::SGD>(parameters, SGDOptions(0.1).momentum(0.9)));
  optimizers.push_back(std::make_unique<serried::Adam>(parameters, AdamOptions(0.1).amsgrad(true)));
  optimizers.push_back(std::make_unique<serried::AdamW>(parameters, AdamWOptions(0.1)));
  for (size_t i = 0; i < optimizers.size(); ++i) {
    EXPECT_EQ(course_of(graph_of(t.step_of(*optimizers[i]))), "forward backward optimizer") << i;
    EXPECT_EQ(course_of(graph_of(t.step_of(*optimizers[i]), {})), "forward backward optimizer") << i;
  }
}

TEST(GraphPhases, AnswerForEveryOpOfAStep) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Graph g = graph_of(t.step_of(optimizer));
  for (size_t i = 0; i < g.nodes().size(); ++i) {
    const Node& node = g.nodes()[i];
    const std::string name = node.short_name();
    Phase expected = node.phase;
    if (name == "addmm" || name == "relu" || name == "mean") expected = Phase::forward;
    if (name.ends_with("_backward") || name == "ones_like" || name == "mm") expected = Phase::backward;
    if (name == "add_") expected = Phase::optimizer;
    EXPECT_EQ(phase_name(node.phase), phase_name(expected)) << line_of(g, i);
  }
}

// A batch of sequences: linear layers add their bias in place, to a tensor that requires gradients.
TEST(GraphPhases, WhatIsWrittenOnTheWayIsNoParameter) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Graph g = graph_of(t.step_of(optimizer), {.passes = {}}, {2, 3, 5});
  EXPECT_TRUE(std::any_of(g.nodes().begin(), g.nodes().end(), [](const Node& node) {
    return node.short_name() == "add_" && node.phase == Phase::forward;
  }));
  EXPECT_EQ(course_of(g), "forward backward optimizer");
}

TEST(GraphPhases, AStepByHandIsOneOfTheOptimizer) {
  Trained t;
  const Step step = [&](const at::Tensor& x) {
    t.net->zero_grad();
    at::Tensor loss = t.loss(x);
    loss.backward();
    const torch::NoGradGuard no_grad;
    const at::Tensor rate = at::full({}, 0.05) * 2;
    for (at::Tensor& p : t.net->parameters()) p.sub_(p.grad() * rate);
    return loss;
  };
  EXPECT_EQ(course_of(graph_of(step)), "forward backward optimizer");
}

TEST(GraphPhases, GradientsSetToZeroAreOther) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step step = [&](const at::Tensor& x) {
    optimizer.zero_grad(/*set_to_none=*/false);
    at::Tensor loss = t.loss(x);
    loss.backward();
    optimizer.step();
    return loss;
  };
  EXPECT_EQ(course_of(graph_of(step)), "other forward backward optimizer");
}

TEST(GraphPhases, ClippingIsForTheOptimizerEvenWhereTheNormIsAResult) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    t.loss(x).backward();
    const torch::NoGradGuard no_grad;
    at::Tensor square = at::zeros({});
    for (at::Tensor& p : t.net->parameters()) square = square + p.grad().square().sum();
    for (at::Tensor& p : t.net->parameters()) p.mutable_grad().mul_(square.rsqrt());
    optimizer.step();
    return square;
  };
  const Graph g = graph_of(step);
  EXPECT_EQ(g.nodes().back().phase, Phase::optimizer);
  for (const Node& node : g.nodes()) {
    if (node.short_name() == "rsqrt" || node.short_name() == "mul_") EXPECT_EQ(node.phase, Phase::optimizer);
  }
}

TEST(GraphPhases, ANormForTheLogIsOther) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    t.loss(x).backward();
    at::Tensor norm = t.net->parameters()[0].grad().norm();
    optimizer.step();
    return norm;
  };
  EXPECT_EQ(course_of(graph_of(step)), "forward backward other optimizer");
}

TEST(GraphPhases, APenaltyOnGradientsIsForward) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    const at::Tensor in = (x * 1).requires_grad_();
    const at::Tensor y = t.net->forward(in).tanh().sum();
    const at::Tensor slope = torch::autograd::grad({y}, {in}, {}, true, /*create_graph=*/true)[0];
    (y + slope.square().sum()).backward();
    optimizer.step();
    return y.detach();
  };
  EXPECT_TRUE(course_of(graph_of(step)).starts_with("forward backward forward backward optimizer"));
}

TEST(GraphPhases, TakeTurnsWhenGradientsOfTwoBatchesAdd) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    t.loss(x).backward();
    at::Tensor loss = t.loss(2 * x);
    loss.backward();
    optimizer.step();
    return loss;
  };
  EXPECT_EQ(course_of(graph_of(step)), "forward backward forward backward optimizer");
}

TEST(GraphPhases, TwoStepsInOneFunctionAreTwo) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Step once = t.step_of(optimizer);
  const Step twice = [&](const at::Tensor& x) { return once(x) + once(x); };
  EXPECT_EQ(course_of(graph_of(twice)), "forward backward optimizer forward backward optimizer forward");
}

TEST(GraphPhases, AveragesOfWeightsAreOther) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Step train = t.step_of(optimizer);
  at::Tensor average = t.net->parameters()[0].detach().clone();
  const Step step = [&](const at::Tensor& x) {
    at::Tensor loss = train(x);
    const torch::NoGradGuard no_grad;
    average.lerp_(t.net->parameters()[0], 0.1);
    return loss;
  };
  EXPECT_EQ(course_of(graph_of(step)), "forward backward optimizer other");
}

TEST(GraphPhases, InferenceIsForward) {
  Trained t;
  const Step step = [&](const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    return t.net->forward(x).softmax(-1);
  };
  EXPECT_EQ(course_of(graph_of(step)), "forward");
  EXPECT_EQ(course_of(graph_of(step, {})), "forward");
}

TEST(GraphPhases, UpdatesInsideBackwardAreTheOptimizers) {
  Trained t;
  DistributedDataParallel ddp(t.net, {.process_group = fake_group(0, 2)});
  const auto optimizers = optimizer_in_backward(ddp, [](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<serried::SGD>(parameters, torch::optim::SGDOptions(0.1));
  });
  const Graph g = graph_of([&](const at::Tensor& x) {
    at::Tensor loss = ddp(x).square().mean();
    loss.backward();
    return loss;
  });
  int64_t num_updates = 0;
  for (const Node& node : g.nodes()) num_updates += node.phase == Phase::optimizer;
  EXPECT_GE(num_updates, 1);
  EXPECT_TRUE(course_of(g).starts_with("forward backward optimizer")) << course_of(g);
}

TEST(GraphPhases, OfDataParallelStepsSurviveEveryPass) {
  const std::vector<Pass> all = {passes::functional_collectives(),
                                 passes::drop_dead(),
                                 passes::fuse_foreach(),
                                 passes::reuse_collectives(),
                                 passes::bucket_collectives(),
                                 passes::overlap(),
                                 passes::freeze(),
                                 passes::hoist_views(),
                                 passes::plan_memory()};
  Trained t;
  DistributedDataParallel ddp(t.net, {.process_group = fake_group(0, 2), .bucket_cap_mb = 1e-4});
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Graph g = graph_of(
      [&](const at::Tensor& x) {
        optimizer.zero_grad();
        at::Tensor loss = ddp(x).square().mean();
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.passes = all});
  for (size_t i = 0; i < g.nodes().size(); ++i) EXPECT_NE(reported_phase(g.nodes()[i]), Phase::other) << line_of(g, i);
  EXPECT_EQ(g.nodes().front().phase, Phase::forward);
  EXPECT_EQ(g.nodes().back().phase, Phase::optimizer);
}

TEST(GraphPhases, OfTensorParallelStepsAreThoseOfTheirParts) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = fake_group(0, 2)});
  torch::nn::Linear net(torch::nn::LinearOptions(10, 3).bias(false));
  distribute_parameter(net->weight, mesh, {Shard(1)});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  const Graph g = graph_of([&](const at::Tensor& x) {
    optimizer.zero_grad();
    at::Tensor loss = net(DTensor::from_local(x, mesh, {Shard(1)})).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  });
  EXPECT_EQ(course_of(g), "forward backward optimizer");
}

TEST(GraphPhases, OfOpsThatBecomeOneStayWhereTheyAgree) {
  const auto node_in = [](Phase phase) {
    Node node{op_named("aten::neg"), {}, {}};
    node.phase = phase;
    return node;
  };
  EXPECT_EQ(common_phase({node_in(Phase::backward), node_in(Phase::backward)}), Phase::backward);
  EXPECT_EQ(common_phase({node_in(Phase::backward), node_in(Phase::optimizer)}), Phase::other);
  EXPECT_EQ(common_phase({}), Phase::other);
}

TEST(GraphPhases, ComeBackFromText) {
  Trained t;
  torch::optim::SGD optimizer(t.net->parameters(), torch::optim::SGDOptions(0.1));
  const Graph g = graph_of(t.step_of(optimizer));
  const Graph read = parse_graph(to_text(g));
  EXPECT_EQ(to_text(read), to_text(g));
  EXPECT_EQ(course_of(read), "forward backward optimizer");
}

}  // namespace
}  // namespace serried::graph
