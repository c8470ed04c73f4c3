// Captured steps of pipelines against eager ones, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "serried/mesh/mesh.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using staged::Layer;

// Eight steps of SGD with momentum: the losses, where the last stage is.
std::vector<at::Tensor> train(const Group& group, Schedule schedule, int64_t stages_per_rank, bool is_captured,
                              std::vector<Layer>& layers) {
  const PipelineTable table =
      pipeline_table(schedule, {.ranks = group->getSize(), .stages_per_rank = stages_per_rank, .microbatches = 4});
  layers = staged::make_layers(table.stages());
  Pipeline pipe(staged::stages_of(table, group->getRank(), layers),
                {.group = group, .schedule = schedule, .microbatches = 4, .loss = staged::loss_fn});
  serried::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto step = [&](const at::Tensor& input, const at::Tensor& target) {
    optimizer.zero_grad();
    auto losses = pipe.step(input, target);
    optimizer.step();
    return losses;
  };
  auto captured = capture(step);
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < 8; ++i) {
    const auto batch = staged::batch_of(6, 2, i);
    for (const at::Tensor& loss : is_captured ? captured(batch.input, batch.target) : step(batch.input, batch.target)) {
      all.push_back(loss.clone());
    }
  }
  if (is_captured) EXPECT_GE(captured.replays(), 4);
  return all;
}

void expect_captured_like_eager(Schedule schedule, int64_t stages_per_rank, int world) {
  run_ranks(world, [&](const Group& group) {
    std::vector<Layer> eager, captured;
    const auto expected = train(group, schedule, stages_per_rank, false, eager);
    const auto actual = train(group, schedule, stages_per_rank, true, captured);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str("loss ", i));
    for (size_t i = 0; i < eager.size(); ++i) {
      const auto theirs = eager[i]->named_parameters();
      for (const auto& item : captured[i]->named_parameters()) {
        expect_equal(item.value(), theirs[item.key()], c10::str("stage ", i, " ", item.key()));
      }
    }
  });
}

TEST(PipelineCaptured, OneFOneBIsBitwiseEager) {
  for (const int world : {1, 2, 3}) expect_captured_like_eager(Schedule::OneFOneB, 1, world);
}

TEST(PipelineCaptured, ZbvIsBitwiseEager) {
  for (const int world : {1, 2}) expect_captured_like_eager(Schedule::ZBV, 2, world);
}

// Three micro-batches of one stage on two data-parallel ranks.
std::string captured_data_parallel(bool is_sharded) {
  return error_text<c10::NotImplementedError>([&] {
    run_ranks(2, [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"pp", "dp"}, {.group = world});
      Layer stage = staged::make_layers(1)[0];
      PipelineStage given = stage;
      if (is_sharded) {
        fully_shard(*stage, {.mesh = mesh["dp"]});
      } else {
        given =
            std::make_shared<DistributedDataParallel<Layer>>(stage, DDPOptions{.process_group = mesh.get_group("dp")});
      }
      Pipeline pipe(given, {.group = mesh.get_group("pp"), .microbatches = 3, .loss = staged::loss_fn});
      serried::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.05));
      auto step = capture([&](const at::Tensor& input, const at::Tensor& target) {
        optimizer.zero_grad();
        pipe.step(input, target);
        optimizer.step();
      });
      for (int64_t i = 0; i < 4; ++i) {
        const auto batch = staged::batch_of(6, 2, i);
        step(batch.input, batch.target);
      }
    });
  });
}

TEST(PipelineCaptured, DataParallelStagesAreRefused) {
  EXPECT_THAT(captured_data_parallel(true),
              ::testing::HasSubstr("[capture] the function accumulates gradients of block 0"));
  EXPECT_THAT(
      captured_data_parallel(false),
      ::testing::HasSubstr("[capture] stage 0 of a pipeline is in DistributedDataParallel, whose ranks agree on "
                           "when to replay without those of other stages\n  fix: run the step eagerly"));
}

}  // namespace
}  // namespace serried::testing
