// CommDebugMode of a net: each collective belongs to the module whose parameters caused it, forward and backward apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/recompute.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/parallel/tensor_parallel/gpt.h"
#include "tests/support/errors.h"
#include "tests/support/hand_placed.h"

namespace serried::testing {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using Tallies = std::map<std::string, CommDebugMode::Tally>;

constexpr int64_t kRows = 4;
constexpr int64_t kInputBytes = kRows * 16 * 4;
constexpr int64_t kContextBytes = 4 * gpt::kContext * 24 * 8;

struct UpDownImpl : nn::Module {
  nn::Linear up{register_module("up", nn::Linear(16, 64))}, down{register_module("down", nn::Linear(64, 16))};
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
};
TORCH_MODULE(UpDown);

nn::Sequential two_blocks() {
  return seeded(1, [] { return nn::Sequential(UpDown(), UpDown()); });
}

void cut_blocks(nn::Module& net, const DeviceMesh& tp) {
  parallelize_module(net, tp, {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
}

std::string calls_of(const Tallies& calls, bool with_bytes) {
  std::string text;
  for (const auto& [name, tally] : calls) {
    text += c10::str(text.empty() ? "" : ", ", name, " x", tally.count);
    if (with_bytes) text += c10::str(" ", tally.bytes);
  }
  return text.empty() ? "-" : text;
}

// One line per module: "0.up | all_reduce x1 256 | -".
std::string lines(const CommDebugMode& comm, bool with_bytes = true) {
  std::string all;
  for (const CommDebugMode::ModuleCalls& module : comm.by_module()) {
    all += c10::str(module.name(), " | ", calls_of(module.forward, with_bytes), " | ",
                    calls_of(module.backward, with_bytes), "\n");
  }
  return all;
}

// Blocks are laid out with gaps, which are no concern of this test.
std::string counts(const CommDebugMode& comm) {
  return lines(comm, /*with_bytes=*/false);
}

// Nothing is counted twice and nothing is left out.
void expect_complete(const CommDebugMode& comm) {
  std::map<std::string, int64_t> counts;
  int64_t bytes = 0;
  for (const CommDebugMode::ModuleCalls& module : comm.by_module()) {
    for (const Tallies* calls : {&module.forward, &module.backward}) {
      for (const auto& [name, tally] : *calls) {
        counts[name] += tally.count;
        bytes += tally.bytes;
      }
    }
  }
  EXPECT_EQ(counts, comm.counts());
  EXPECT_EQ(bytes, comm.bytes());
}

TEST(ByModule, StylesBelongToTheModulesThatHaveThem) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    const CommDebugMode comm(*net);
    net->forward(at::ones({kRows, 16})).square().mean().backward();
    EXPECT_EQ(lines(comm), c10::str("0.down | all_reduce x1 ", kInputBytes, " | -\n", "1.up | - | all_reduce x1 ",
                                    kInputBytes, "\n", "1.down | all_reduce x1 ", kInputBytes, " | -\n"));
    expect_complete(comm);
  });
}

TEST(ByModule, QueryKeyAndValueShareWhatTheFirstOfThemAsks) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    gpt::Gpt net = gpt::make_gpt({.layers = 1});
    parallelize_module(*net, mesh, gpt::tensor_plan());
    const gpt::Batch batch = gpt::batch_of(0);
    const CommDebugMode comm(*net);
    const ImplicitReplication targets;
    gpt::loss_of(net(batch.ids), batch.targets).backward();
    EXPECT_EQ(lines(comm),
              "tokens | all_reduce x1 3840 | -\n"
              "blocks.0.q | - | all_reduce x1 3840\n"
              "blocks.0.out | all_reduce x1 3840 | -\n"
              "blocks.0.up | - | all_reduce x1 3840\n"
              "blocks.0.down | all_reduce x1 3840 | -\n"
              "head | - | all_reduce x1 3840\n"
              "after head | all_reduce x2 320 | all_reduce x1 160\n");
    expect_complete(comm);
  });
}

TEST(ByModule, SumsOfManyModulesBelongToTheInnermostAroundThem) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    gpt::Gpt net = gpt::make_gpt({.layers = 1});
    parallelize_module(*net, mesh, gpt::sequence_plan());
    const gpt::Batch batch = gpt::batch_of(0);
    const CommDebugMode comm(*net);
    const ImplicitReplication targets;
    gpt::loss_of(net(batch.ids), batch.targets).backward();
    // Norms, places and the biases of what is cut by rows; this rank has 3 or 2 of 5 tokens.
    const std::string part = std::to_string(kContextBytes * (mesh.get_local_rank() == 0 ? 3 : 2) / 5);
    EXPECT_EQ(lines(comm),
              c10::str("(net) | - | all_reduce x1 2496\n",                                     //
                       "tokens | reduce_scatter x1 3840 | all_gather x1 ", part, "\n",         //
                       "blocks.0.q | all_gather x1 ", part, " | reduce_scatter x1 3840\n",     //
                       "blocks.0.out | reduce_scatter x1 3840 | all_gather x1 ", part, "\n",   //
                       "blocks.0.up | all_gather x1 ", part, " | reduce_scatter x1 3840\n",    //
                       "blocks.0.down | reduce_scatter x1 3840 | all_gather x1 ", part, "\n",  //
                       "head | all_gather x1 ", part, " | reduce_scatter x1 3840\n",           //
                       "after head | all_reduce x2 320 | all_reduce x1 160\n"));
    expect_complete(comm);
  });
}

TEST(ByModule, BlocksOfFullyShardBelongToTheirModules) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    nn::Sequential net = two_blocks();
    net->push_back("head", nn::Linear(16, 3));
    for (int i : {0, 1}) fully_shard(*net->ptr(size_t(i)), {.mesh = mesh});
    fully_shard(*net, {.mesh = mesh});
    const CommDebugMode comm(*net);
    net->forward(at::ones({kRows, 16})).square().mean().backward();
    EXPECT_EQ(counts(comm),
              "0 | all_gather x1 | all_gather x1, reduce_scatter x1\n"
              "1 | all_gather x1 | all_gather x1, reduce_scatter x1\n"
              "head | all_gather x1 | reduce_scatter x1\n");
    expect_complete(comm);
  });
}

TEST(ByModule, ABucketBelongsToTheModuleAroundItsParameters) {
  run_ranks(2, [](const Group& group) {
    nn::Sequential net = two_blocks();
    DistributedDataParallel ddp(net, {.process_group = group});
    const CommDebugMode comm(*net);
    ddp(at::ones({kRows, 16})).square().mean().backward();
    const int64_t bytes = 2 * (2 * 16 * 64 + 64 + 16) * 4;
    EXPECT_EQ(comm.by_module().size(), 1u);
    EXPECT_EQ(comm.by_module()[0].name(), "(net)");
    EXPECT_EQ(comm.by_module()[0].backward.at("all_reduce").bytes, bytes);
    expect_complete(comm);
  });
}

TEST(ByModule, DataParallelTimesTensorParallelKnowsPartsByTheirParameters) {
  on_mesh({2, 2}, [](const DeviceMesh& shape) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = shape.root_group()});
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh["tp"]);
    DistributedDataParallel ddp(net, {.process_group = mesh.get_group("dp")});
    const CommDebugMode comm(*net);
    ddp(at::ones({kRows, 16})).square().mean().backward();
    const int64_t bytes = 2 * ((2 * 16 * 64 + 64) / 2 + 16) * 4;
    EXPECT_EQ(lines(comm), c10::str("(net) | - | all_reduce x1 ", bytes, "\n",
                                    "0.down | all_reduce x1 256 | -\n"
                                    "1.up | - | all_reduce x1 256\n"
                                    "1.down | all_reduce x1 256 | -\n"));
    expect_complete(comm);
  });
}

TEST(ByModule, WhatOpsBetweenModulesMoveComesAfterTheLastModule) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto net = hand_placed::make<hand_placed::Block>(mesh, true);
    const DTensor x = hand_placed::batch(mesh);
    const CommDebugMode comm(*net);
    net->forward(x).square().mean().backward();
    // The gradients of q, k and v meet in front of the norm, and are summed up for its backward.
    EXPECT_EQ(lines(comm),
              "norm_1 | - | all_reduce x1 2688\n"
              "after attention.out | all_reduce x1 2688 | -\n"
              "norm_2 | - | all_reduce x1 2688\n"
              "after mlp.down | all_reduce x1 2688 | -\n");
    expect_complete(comm);
  });
}

TEST(ByModule, EveryStrategyIsCountedOnceAndWhole) {
  on_mesh({2, 2}, [](const DeviceMesh& shape) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = shape.root_group()});
    gpt::Gpt net = gpt::make_gpt();
    parallelize_module(*net, mesh["tp"], gpt::sequence_plan());
    for (const auto& block : *net->blocks) fully_shard(*block.ptr(), {.mesh = mesh["dp"]});
    fully_shard(*net, {.mesh = mesh["dp"]});
    torch::optim::AdamW optimizer(net->parameters(), 0.01);
    const gpt::Batch batch = gpt::batch_of(int(mesh.get_local_rank("dp")));
    const CommDebugMode comm(*net);
    const ImplicitReplication targets;
    at::Tensor x = net->tokens(batch.ids) + net->places(at::arange(gpt::kContext));
    for (size_t i = 0; i < net->blocks->size(); ++i) {
      const auto block = net->blocks->ptr<gpt::BlockImpl>(i);
      x = recompute([block](const at::Tensor& y) { return block->forward(y); }, x);
    }
    gpt::loss_of(net->head(net->norm(x)), batch.targets).backward();
    clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    expect_complete(comm);
    std::vector<std::string> names;
    for (const CommDebugMode::ModuleCalls& module : comm.by_module()) names.push_back(module.name());
    // The gradients of norms and row-wise biases are summed up with the others of their block.
    EXPECT_THAT(names, ::testing::ElementsAre("(net)", "tokens", "blocks.0", "blocks.0.q", "blocks.0.out",
                                              "blocks.0.up", "blocks.0.down", "blocks.1", "blocks.1.q", "blocks.1.out",
                                              "blocks.1.up", "blocks.1.down", "head", "after head", "(no module)"));
    // The norm of all gradients: one number over each set of ranks.
    EXPECT_EQ(comm.by_module().back().forward, (Tallies{{"all_reduce", {2, 16}}}));
  });
}

TEST(ByModule, WhatIsComputedAgainCountsAsBackward) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    const CommDebugMode comm(*net);
    const at::Tensor x = at::ones({kRows, 16});
    recompute([net](const at::Tensor& y) mutable { return net->forward(y); }, x).square().mean().backward();
    EXPECT_EQ(lines(comm),
              "0.down | all_reduce x1 256 | all_reduce x1 256\n"
              "1.up | - | all_reduce x1 256\n"
              "1.down | all_reduce x1 256 | -\n");
    expect_complete(comm);
  });
}

TEST(ByModule, AReplayBelongsToNoModule) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad();
      const at::Tensor loss = net->forward(x).square().mean();
      loss.backward();
      return loss;
    });
    for (int i = 0; i < 5 && step.replays() == 0; ++i) step(at::ones({kRows, 16}));
    ASSERT_GT(step.replays(), 0);
    const CommDebugMode comm(*net);
    step(at::ones({kRows, 16}));
    ASSERT_EQ(comm.by_module().size(), 1u);
    EXPECT_EQ(comm.by_module()[0].name(), "(no module)");
    EXPECT_EQ(comm.by_module()[0].forward.at("all_reduce").count, 3);
    expect_complete(comm);
  });
}

TEST(ByModule, ACallThatIsRecordedCountsAsAnEagerOneAndIsReplayedLater) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    const auto train = [&](const at::Tensor& x) {
      net->zero_grad();
      const at::Tensor loss = net->forward(x).square().mean();
      loss.backward();
      return loss;
    };
    auto step = capture(train);
    std::string recorded, eager;
    {
      const CommDebugMode comm(*net);
      step(at::ones({kRows, 16}));
      recorded = lines(comm);
    }
    {
      const CommDebugMode comm(*net);
      train(at::ones({kRows, 16}));
      eager = lines(comm);
    }
    EXPECT_EQ(recorded, eager);
    for (int i = 0; i < 5; ++i) step(at::ones({kRows, 16}));
    EXPECT_GT(step.replays(), 0) << step.last_recapture_reason();
  });
}

TEST(ByModule, AParameterThatModulesShareBelongsToTheFirst) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    gpt::Gpt net = gpt::make_gpt({.layers = 1, .tied = true});
    parallelize_module(*net, mesh, gpt::tensor_plan());
    const gpt::Batch batch = gpt::batch_of(0);
    const CommDebugMode comm(*net);
    const ImplicitReplication targets;
    gpt::loss_of(net(batch.ids), batch.targets).backward();
    EXPECT_THAT(lines(comm), ::testing::StartsWith("tokens | all_reduce x1 3840 | all_reduce x1 3840\n"));
    EXPECT_THAT(lines(comm), HasSubstr("after tokens | all_reduce x2 320 | all_reduce x1 160\n"));
    expect_complete(comm);
  });
}

TEST(ByModule, NestedModesKnowEachTheirOwnNet) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    const CommDebugMode whole(*net);
    const at::Tensor x = net->at<UpDownImpl>(0).forward(at::ones({kRows, 16}));
    {
      const CommDebugMode second(*net->ptr(1));
      net->at<UpDownImpl>(1).forward(x).square().mean().backward();
      EXPECT_EQ(lines(second),
                "up | - | all_reduce x1 256\n"
                "down | all_reduce x1 256 | -\n");
    }
    EXPECT_EQ(lines(whole),
              "0.down | all_reduce x1 256 | -\n"
              "1.up | - | all_reduce x1 256\n"
              "1.down | all_reduce x1 256 | -\n");
    expect_complete(whole);
  });
}

TEST(ByModule, TheReportHasATableAndJsonTheSame) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Sequential net = two_blocks();
    cut_blocks(*net, mesh);
    const CommDebugMode comm(*net);
    net->forward(at::ones({kRows, 16})).square().mean().backward();
    EXPECT_THAT(comm.report(), HasSubstr("by module  forward                backward\n"
                                         "  0.down   all_reduce x1 (256 B)\n"
                                         "  1.up                            all_reduce x1 (256 B)\n"
                                         "  1.down   all_reduce x1 (256 B)\n"));
    EXPECT_THAT(comm.report(),
                HasSubstr("redistribute f32[4,16] P -> R, explicit, 256 B, forward of (no scope), 0.down\n"));
    const nlohmann::json json = nlohmann::json::parse(comm.json());
    EXPECT_EQ(json["modules"][1]["module"], "1.up");
    EXPECT_EQ(json["modules"][1]["backward"]["all_reduce"]["bytes"], 256);
  });
}

TEST(ByModule, AModeWithoutANetSaysSo) {
  const CommDebugMode comm;
  EXPECT_EQ(error_text<c10::ValueError>([&] { comm.by_module(); }),
            "[CommDebugMode::by_module] the mode was made without a net, so it knows no modules\n"
            "  fix: name the net where the mode begins: CommDebugMode comm(*net)");
}

}  // namespace
}  // namespace serried::testing
