// explain of a net: how parameters lie, what styles ask, blocks, and what modules communicate in a step.
#include "serried/parallel/explain_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/base/text.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing {
namespace {

namespace nn = torch::nn;
using Tallies = std::map<std::string, CommDebugMode::Tally>;

nn::Sequential explained_net() {
  return seeded(1, [] {
    return nn::Sequential({{"norm", nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({16})))},
                           {"up", nn::AnyModule(nn::Linear(16, 64))},
                           {"act", nn::AnyModule(nn::GELU())},
                           {"down", nn::AnyModule(nn::Linear(64, 16))}});
  });
}

TEST(ExplainModule, APlainNetHasNothingToSayButItsSizes) {
  nn::Sequential net = explained_net();
  EXPECT_EQ(explain(*net).text(),
            "torch::nn::SequentialImpl: 8.4 KiB of 8.4 KiB of parameters on this rank\n"
            "module  parameter  lies as     here\n"
            "norm    weight     f32[16]     64 B\n"
            "        bias       f32[16]     64 B\n"
            "up      weight     f32[64,16]  4.0 KiB\n"
            "        bias       f32[64]     256 B\n"
            "down    weight     f32[16,64]  4.0 KiB\n"
            "        bias       f32[16]     64 B\n");
}

TEST(ExplainModule, ShowsPlacementsAndWhatStylesAsk) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = explained_net();
    parallelize_module(*net, mesh,
                       {{"norm", SequenceParallel({.dim = 0})},
                        {"up", ColwiseParallel()},
                        {"down", RowwiseParallel({.output = {Shard(0)}})}});
    EXPECT_EQ(explain(*net).text(),
              "torch::nn::SequentialImpl: 4.3 KiB of 8.4 KiB of parameters on this rank\n"
              "module  parameter  lies as                  here     in -> out\n"
              "norm    weight     f32[16] R on mesh 2      64 B     S0 -> S0\n"
              "        bias       f32[16] R on mesh 2      64 B\n"
              "up      weight     f32[64,16] S0 on mesh 2  2.0 KiB  R -> S-1\n"
              "        bias       f32[64] S0 on mesh 2     128 B\n"
              "down    weight     f32[16,64] S1 on mesh 2  2.0 KiB  S-1 -> S0\n"
              "        bias       f32[16] R on mesh 2      64 B\n");
    const ModuleExplanation found = explain(*net, [&] { net->forward(at::ones({2, 16})).square().mean().backward(); });
    EXPECT_EQ(found.text(),
              "torch::nn::SequentialImpl: 4.3 KiB of 8.4 KiB of parameters on this rank\n"
              "module  parameter  lies as                  here     in -> out  forward                                 "
              "          backward\n"
              "norm    weight     f32[16] R on mesh 2      64 B     S0 -> S0                                           "
              "          all_reduce x1 (128 B)\n"
              "        bias       f32[16] R on mesh 2      64 B\n"
              "up      weight     f32[64,16] S0 on mesh 2  2.0 KiB  R -> S-1   all_gather x1 (128 B)                   "
              "          reduce_scatter x1 (256 B)\n"
              "        bias       f32[64] S0 on mesh 2     128 B\n"
              "down    weight     f32[16,64] S1 on mesh 2  2.0 KiB  S-1 -> S0  reduce_scatter x1 (256 B)               "
              "          all_gather x1 (128 B)\n"
              "        bias       f32[16] R on mesh 2      64 B\n"
              "all                                                             all_gather x1 (128 B), reduce_scatter "
              "x1 (256 B)  all_gather x1 (128 B), all_reduce x1 (128 B), reduce_scatter x1 (256 B)\n");
  });
}

TEST(ExplainModule, ShowsBlocksBesideOtherAxes) {
  on_mesh({2, 2}, [](const DeviceMesh& shape) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = shape.root_group()});
    nn::Sequential net = explained_net();
    parallelize_module(*net, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    const FullyShardHandle inner = fully_shard(*net->ptr(1), {.mesh = mesh["dp"]});
    const FullyShardHandle outer = fully_shard(*net, {.mesh = mesh["dp"]});
    const ModuleExplanation found = explain(*net, [&] { net->forward(at::ones({4, 16})).square().mean().backward(); });
    std::vector<std::string> names;
    for (const ModuleExplanation::Module& module : found.modules) names.push_back(module.name);
    ASSERT_EQ(names, (std::vector<std::string>{"(net)", "norm", "up", "down"}));
    const ModuleExplanation::Module &all = found.modules[0], &up = found.modules[2], &down = found.modules[3];
    EXPECT_EQ(up.parameters[0].lies_as, "f32[64,16] S0 S0 on mesh tp=2 dp=2");
    EXPECT_EQ(up.parameters[0].bytes, 64 * 16 * 4 / 4);
    EXPECT_EQ(up.parameters[0].block, c10::str("0 (", detail::bytes_text(inner.whole_bytes()), ")"));
    EXPECT_EQ(down.parameters[1].block, c10::str("1 (", detail::bytes_text(outer.whole_bytes()), ")"));
    EXPECT_EQ(down.asks, "S-1 -> R");
    // What fully_shard sends for a block stands at its module, what styles send where they are.
    EXPECT_EQ(all.forward.at("all_gather").count, 1);
    EXPECT_EQ(all.backward.at("reduce_scatter").count, 1);
    EXPECT_EQ(up.forward.at("all_gather").count, 1);
    EXPECT_EQ(up.backward.at("all_reduce"), (CommDebugMode::Tally{1, 4 * 16 * 4}));
    EXPECT_EQ(down.forward, (Tallies{{"all_reduce", {1, 4 * 16 * 4}}}));
    EXPECT_EQ(down.backward, Tallies());
    EXPECT_THAT(
        found.text(),
        ::testing::StartsWith("torch::nn::SequentialImpl: 2.2 KiB of 8.4 KiB of parameters on this rank\n"
                              "module  parameter  lies as                             here     block (whole)  in -> "
                              "out  forward  "));
  });
}

TEST(ExplainModule, HandPlacedParametersAreExplainedAsWell) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Linear up(16, 64);
    distribute_parameter(up->weight, mesh, {Shard(1)});
    distribute_parameter(up->bias, mesh);
    const DTensor x = distribute_tensor(at::ones({4, 16}), mesh, {Shard(1)});
    const ModuleExplanation found = explain(*up, [&] { up(x).square().mean().backward(); });
    EXPECT_EQ(found.text(),
              "torch::nn::LinearImpl: 2.2 KiB of 4.2 KiB of parameters on this rank\n"
              "module       parameter  lies as                  here     forward                  backward\n"
              "(net)        weight     f32[64,16] S1 on mesh 2  2.0 KiB\n"
              "             bias       f32[64] R on mesh 2      256 B\n"
              "after (net)                                               all_reduce x1 (1.0 KiB)  all_reduce x1 (1.0 "
              "KiB)\n"
              "all                                                       all_reduce x1 (1.0 KiB)  all_reduce x1 (1.0 "
              "KiB)\n");
  });
}

TEST(ExplainModule, BytesAreThoseOfCommDebugMode) {
  on_mesh({2, 2}, [](const DeviceMesh& shape) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = shape.root_group()});
    gpt::Gpt net = gpt::make_gpt();
    parallelize_module(*net, mesh["tp"], gpt::sequence_plan());
    for (const auto& block : *net->blocks) fully_shard(*block.ptr(), {.mesh = mesh["dp"]});
    fully_shard(*net, {.mesh = mesh["dp"]});
    const gpt::Batch batch = gpt::batch_of(0);
    const CommDebugMode comm;
    const ModuleExplanation found = explain(*net, [&] {
      const ImplicitReplication targets;
      gpt::loss_of(net(batch.ids), batch.targets).backward();
    });
    int64_t bytes = 0, here = 0;
    for (const Tallies& sums : {found.forward(), found.backward()}) {
      for (const auto& [name, tally] : sums) bytes += tally.bytes;
    }
    EXPECT_EQ(bytes, comm.bytes());
    for (const auto& item : net->named_parameters()) here += int64_t(DTensor(item.value()).to_local().nbytes());
    EXPECT_EQ(found.bytes, here);
  });
}

}  // namespace
}  // namespace serried::testing
