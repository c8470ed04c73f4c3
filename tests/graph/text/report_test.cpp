// What a graph costs, against sums done by hand.
#include "serried/graph/text/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/making/modules.h"
#include "tests/graph/text/sample_graph.h"
#include "tests/support/fake_group.h"

namespace serried::graph {
namespace {

using serried::testing::f32_meta;
using serried::testing::group_argument;
using serried::testing::op_named;
using serried::testing::reduce_op;
using serried::testing::sample_graph;

TEST(GraphReport, SumsBytesPerCollectiveAndGroup) {
  Graph g;
  const ValueId a = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({5})});
  const ValueId b = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({7, 2})});
  const auto add = [&](ValueId id, const char* group) {
    g.add_node({op_named("serried::all_reduce_"),
                {Argument::of_value(id), group_argument(group), reduce_op(c10d::ReduceOp::SUM)},
                {}});
  };
  add(a, "dp");
  add(b, "tp");
  add(b, "dp");
  g.add_node({op_named("serried::barrier"), {group_argument("dp")}, {}});
  const GraphReport r = report(g);
  ASSERT_EQ(r.collectives.size(), 3);
  EXPECT_EQ(r.collectives[0].group, "dp");
  EXPECT_EQ(r.collectives[0].kind, "all_reduce");
  EXPECT_EQ(r.collectives[0].count, 2);
  EXPECT_EQ(r.collectives[0].bytes, 4 * (5 + 14));
  EXPECT_EQ(r.collectives[1].group, "tp");
  EXPECT_EQ(r.collectives[1].bytes, 4 * 14);
  EXPECT_EQ(r.collectives[2].kind, "barrier");
  EXPECT_EQ(r.collectives[2].bytes, 0);
  EXPECT_EQ(r.collective_bytes(), 4 * 33);
}

TEST(GraphReport, CountsOps) {
  const GraphReport r = report(sample_graph());
  EXPECT_EQ(r.num_ops, 6);
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"mm", 2}, {"add_", 1}, {"all_reduce", 1}, {"mul", 1}, {"t", 1}};
  EXPECT_EQ(r.ops, expected);
}

TEST(GraphReport, FindsThePeakOfWhatLives) {
  const GraphReport r = report(sample_graph());
  EXPECT_EQ(r.input_bytes, 4 * 12);  // the transposed view is the same memory
  EXPECT_EQ(r.persistent_bytes, 4 * 6);
  EXPECT_EQ(r.constant_bytes, 4);
  // x @ p and its half, while the latter is computed; each has 8 elements.
  EXPECT_EQ(r.peak_bytes, 2 * 4 * 8);
  EXPECT_EQ(r.peak_node, 1);
}

TEST(GraphReport, CountsResultsToTheEnd) {
  Graph g;
  const ValueId x = g.add_value({.kind = ValueKind::input, .meta = f32_meta({3})});
  for (int i = 0; i < 4; ++i) {
    const ValueId y = g.add_value({.meta = f32_meta({3})});
    g.add_node({op_named("aten::neg"), {Argument::of_value(x)}, {{y}}});
    if (i < 2) g.outputs().push_back(y);
  }
  const GraphReport r = report(g);
  EXPECT_EQ(r.peak_bytes, 3 * 4 * 3);  // two results, and one that nobody reads
  EXPECT_EQ(r.peak_node, 2);
}

TEST(GraphReport, CountsBuffersByTheirArena) {
  Graph g;
  const ValueId x = g.add_value({.kind = ValueKind::input, .meta = f32_meta({3})});
  const ValueId buffer = g.add_value({.kind = ValueKind::buffer, .meta = f32_meta({3})});
  g.add_node({op_named("aten::neg", "out"), {Argument::of_value(x), Argument::of_value(buffer)}, {{buffer}}});
  g.set_arena_bytes(64);
  EXPECT_EQ(report(g).arena_bytes, 64);
  EXPECT_EQ(report(g).peak_bytes, 0);
}

TEST(GraphReport, CountsWhatNodesWrite) {
  const Graph g = sample_graph();
  const std::vector<int64_t> expected = {4 * 8, 4 * 8, 4 * 8, /*a view*/ 0, 4 * 6, /*in place*/ 4 * 6};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(written_bytes(g, g.nodes()[i]), expected[i]) << i;
}

TEST(GraphReport, SumsPerPhaseAndCountsCommunicationApart) {
  Graph g = sample_graph();
  const std::vector<Phase> phases = {Phase::forward,  Phase::forward,  Phase::forward,
                                     Phase::backward, Phase::backward, Phase::optimizer};
  for (size_t i = 0; i < phases.size(); ++i) g.nodes()[i].phase = phases[i];
  const GraphReport r = report(g);
  ASSERT_EQ(r.phases.size(), 4);
  const std::vector<PhaseUse> expected = {{Phase::forward, 2, 2 * 4 * 8},
                                          {Phase::backward, 2, 4 * 6},
                                          {Phase::collective, 1, 4 * 8},
                                          {Phase::optimizer, 1, 4 * 6}};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(r.phases[i].phase, expected[i].phase);
    EXPECT_EQ(r.phases[i].count, expected[i].count);
    EXPECT_EQ(r.phases[i].bytes, expected[i].bytes);
  }
  EXPECT_THAT(r.to_string(), ::testing::HasSubstr("\n"
                                                  "  phase            ops      written\n"
                                                  "  forward            2         64 B\n"
                                                  "  backward           2         24 B\n"
                                                  "  collective         1         32 B\n"
                                                  "  optimizer          1         24 B\n"
                                                  "\n"
                                                  "  memory\n"));
}

TEST(GraphReport, KnowsWhatLivesDuringEachOp) {
  // The product until it is scaled, that until it is reduced, the result and the gradient to the end.
  EXPECT_EQ(live_bytes(sample_graph()), (std::vector<int64_t>{32, 64, 64, 32, 56, 56}));
}

// A captured step of rank 0, without its peers.
template <class Module>
GraphReport report_of_step(Module& module, const at::Tensor& x, torch::optim::Optimizer& optimizer,
                           CaptureOptions options = {}) {
  auto step = capture(
      [&](const at::Tensor& in) {
        optimizer.zero_grad();
        at::Tensor loss = module(in).square().mean();
        loss.backward();
        optimizer.step();
        return loss;
      },
      std::move(options));
  for (int i = 0; i < 10 && step.captures() == 0; ++i) step(x);
  return report(step.graph());
}

TEST(GraphReport, PlansDataParallelTrainingOnThousandsOfRanks) {
  for (int ranks : {8, 4096}) {
    torch::nn::Linear net(5, 3);
    DistributedDataParallel ddp(net, {.process_group = serried::testing::fake_group(0, ranks)});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    const GraphReport r = report_of_step(ddp, torch::randn({2, 5}), optimizer);
    ASSERT_EQ(r.collectives.size(), 1);
    EXPECT_EQ(r.collectives[0].kind, "all_reduce");
    EXPECT_EQ(r.collectives[0].bytes, 4 * (5 * 3 + 3));  // the gradients
    EXPECT_EQ(r.persistent_bytes, 2 * 4 * (5 * 3 + 3));  // and the parameters
    EXPECT_EQ(r.input_bytes, 4 * 2 * 5);
  }
}

TEST(GraphReport, PlansTensorParallelTrainingOnThousandsOfRanks) {
  for (int ranks : {8, 4096}) {
    const DeviceMesh mesh = init_device_mesh("cpu", {ranks}, {"tp"}, {.group = serried::testing::fake_group(0, ranks)});
    torch::nn::Linear net(torch::nn::LinearOptions(2 * ranks, 3).bias(false));
    distribute_parameter(net->weight, mesh, {Shard(1)});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    const at::Tensor x = DTensor::from_local(torch::randn({5, 2}), mesh, {Shard(1)});
    // The sum of the output over ranks, which both the square and its gradient need.
    const int64_t output_bytes = 4 * 5 * 3;
    for (const int64_t sums : {2, 1}) {
      CaptureOptions options;
      if (sums == 1) options.passes = {passes::reuse_collectives()};
      const GraphReport r = report_of_step(net, x, optimizer, options);
      ASSERT_EQ(r.collectives.size(), 1);
      EXPECT_EQ(r.collectives[0].kind, "all_reduce");
      EXPECT_EQ(r.collectives[0].count, sums);
      EXPECT_EQ(r.collectives[0].bytes, sums * output_bytes);
      EXPECT_EQ(r.input_bytes, 4 * 5 * 2);
      EXPECT_EQ(r.persistent_bytes, 4 * 2 * 3);
    }
  }
}

TEST(GraphReport, ReadsAsTables) {
  EXPECT_EQ(report(sample_graph()).to_string(),
            "  collective  group   calls        bytes\n"
            "  all_reduce  dp          1         32 B\n"
            "  total                   1         32 B\n"
            "\n"
            "  memory\n"
            "  persistent                      24 B\n"
            "  constants                        4 B\n"
            "  inputs                          48 B\n"
            "  computed, at its peak           64 B\n"
            "  total                          140 B\n"
            "\n"
            "  ops                                6\n"
            "  mm                                 2\n"
            "  add_                               1\n"
            "  all_reduce                         1\n"
            "  mul                                1\n"
            "  t                                  1\n");
}

}  // namespace
}  // namespace serried::graph
