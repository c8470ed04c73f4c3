// Captured steps of pipelines against eager ones, bit for bit.
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "serried/mesh/mesh.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/guards.h"
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

void expect_captured_like_eager(Schedule schedule, int64_t stages_per_rank, int world,
                                const std::string& backend = "threads") {
  const auto on_rank = [&](const Group& group) {
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
  };
  run_ranks(world, on_rank, {.backend = backend});
}

TEST(PipelineCaptured, OneFOneBIsBitwiseEager) {
  for (const int world : {1, 2, 3}) expect_captured_like_eager(Schedule::OneFOneB, 1, world);
}

TEST(PipelineCaptured, ZbvIsBitwiseEager) {
  for (const int world : {1, 2}) expect_captured_like_eager(Schedule::ZBV, 2, world);
}

TEST(PipelineCaptured, OnSharedMemoryAndGlooItIsBitwiseEager) {
  for (const char* backend : {"shm", "gloo"}) {
    expect_captured_like_eager(Schedule::OneFOneB, 1, 3, backend);
    expect_captured_like_eager(Schedule::ZBV, 2, 2, backend);
  }
}

TEST(PipelineCaptured, OptionsOfModulesMayChange) {
  run_ranks(2, [](const Group& group) {
    torch::nn::BatchNorm1d norm(6);
    norm->to(at::kDouble);
    Pipeline pipe(norm, {.group = group, .microbatches = 2, .loss = staged::loss_fn});
    auto step = capture([&](const at::Tensor& input, const at::Tensor& target) { return pipe.step(input, target); });
    const at::Tensor x = torch::arange(48).sin().to(at::kDouble).view({8, 6});
    for (int i = 0; i < 6; ++i) step(x, x);
    EXPECT_GT(step.replays(), 0);
    norm->options.momentum(0);
    const at::Tensor mean = norm->running_mean.clone();
    step(x, x);
    expect_equal(norm->running_mean, mean);
  });
}

enum class DataParallel { ddp, sharded, sharded_with_tensor_parallel };

PipelineStage data_parallel(Layer stage, const DeviceMesh& mesh, DataParallel way) {
  if (way == DataParallel::ddp) {
    return std::make_shared<DistributedDataParallel<Layer>>(stage, DDPOptions{.process_group = mesh.get_group("dp")});
  }
  if (way == DataParallel::sharded_with_tensor_parallel) {
    parallelize_module(*stage, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  }
  fully_shard(*stage, {.mesh = mesh["dp"]});
  return stage;
}

// Eight steps on two pipeline ranks times two data-parallel ones with batches of their own: losses, then parameters.
std::vector<at::Tensor> train_data_parallel(const DeviceMesh& mesh, Schedule schedule, DataParallel way,
                                            bool is_captured) {
  const Group pp = mesh.get_group("pp");
  const int64_t per_rank = schedule == Schedule::ZBV ? 2 : 1;
  const PipelineTable table = pipeline_table(schedule, {.ranks = 2, .stages_per_rank = per_rank, .microbatches = 4});
  std::vector<Layer> layers = staged::make_layers(table.stages());
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(pp->getRank())) {
    stages.push_back(data_parallel(layers[size_t(index)], mesh, way));
  }
  Pipeline pipe(stages, {.group = pp, .schedule = schedule, .microbatches = 4, .loss = staged::loss_fn});
  serried::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto step = [&](const at::Tensor& input, const at::Tensor& target) {
    optimizer.zero_grad();
    auto losses = pipe.step(input, target);
    optimizer.step();
    return losses;
  };
  auto captured = capture(step);
  const ImplicitReplication batches_are_whole;  // beside tensor parallel parameters
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < 8; ++i) {
    const auto batch = staged::batch_of(6, 2, i + 10 * mesh.get_group("dp")->getRank());
    for (const at::Tensor& loss : is_captured ? captured(batch.input, batch.target) : step(batch.input, batch.target)) {
      all.push_back(is_dtensor(loss) ? DTensor(loss).full_tensor() : loss.clone());
    }
  }
  if (is_captured) EXPECT_GE(captured.replays(), 3) << captured.last_recapture_reason();
  for (const at::Tensor& parameter : pipe.parameters()) {
    all.push_back(is_dtensor(parameter) ? DTensor(parameter).full_tensor() : parameter);
  }
  return all;
}

void expect_data_parallel_like_eager(DataParallel way) {
  const int64_t tp = way == DataParallel::sharded_with_tensor_parallel ? 2 : 1;
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::ZBV}) {
    run_ranks(int(4 * tp), [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, tp}, {"pp", "dp", "tp"}, {.group = world});
      const auto expected = train_data_parallel(mesh, schedule, way, false);
      const auto actual = train_data_parallel(mesh, schedule, way, true);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], std::to_string(i));
    });
  }
}

TEST(PipelineCaptured, DataParallelStagesAreBitwiseEager) {
  for (int round = 0; round < 5; ++round) expect_data_parallel_like_eager(DataParallel::ddp);
}

TEST(PipelineCaptured, FullyShardedStagesAreBitwiseEager) {
  for (int round = 0; round < 3; ++round) expect_data_parallel_like_eager(DataParallel::sharded);
}

TEST(PipelineCaptured, FullyShardedTensorParallelStagesAreBitwiseEager) {
  expect_data_parallel_like_eager(DataParallel::sharded_with_tensor_parallel);
}

TEST(PipelineCaptured, OutputsAreNotKept) {
  run_ranks(2, [](const Group& group) {
    Layer layer = staged::make_layers(2)[size_t(group->getRank())];
    Pipeline pipe(layer, {.group = group, .microbatches = 2, .loss = staged::loss_fn, .keep_outputs = true});
    auto step = capture([&](const at::Tensor& input, const at::Tensor& target) { return pipe.step(input, target); });
    const staged::Batch batch = staged::batch_of(4, 2, 0);
    const std::string text = error_text<c10::NotImplementedError>([&] {
      for (int i = 0; i < 4; ++i) step(batch.input, batch.target);
    });
    EXPECT_NE(text.find("[Pipeline::step] a replay of a captured step would not keep outputs\n  fix: leave out "
                        ".keep_outputs, or call step() outside of the captured function"),
              std::string::npos)
        << text;
  });
}

TEST(PipelineCaptured, EvaluatesBetweenReplays) {
  for (const auto& [schedule, per_rank] : {std::pair(Schedule::OneFOneB, 1), std::pair(Schedule::ZBV, 2)}) {
    run_ranks(2, [&, schedule = schedule, per_rank = per_rank](const Group& group) {
      const PipelineTable table =
          pipeline_table(schedule, {.ranks = 2, .stages_per_rank = per_rank, .microbatches = 4});
      std::vector<at::Tensor> outputs[2];
      for (const bool is_captured : {false, true}) {
        std::vector<Layer> layers = staged::make_layers(table.stages());
        Pipeline pipe(staged::stages_of(table, group->getRank(), layers),
                      {.group = group, .schedule = schedule, .microbatches = 4, .loss = staged::loss_fn});
        serried::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.05));
        const auto step = [&](const at::Tensor& input, const at::Tensor& target) {
          optimizer.zero_grad();
          auto losses = pipe.step(input, target);
          optimizer.step();
          return losses;
        };
        auto captured_step = capture(step);
        auto captured_eval = capture([&](const at::Tensor& input) { return pipe.eval(input); });
        for (int64_t i = 0; i < 8; ++i) {
          const staged::Batch batch = staged::batch_of(6, 2, i);
          if (is_captured) captured_step(batch.input, batch.target);
          if (!is_captured) step(batch.input, batch.target);
          // Now and then another batch, as it comes.
          const bool replays = is_captured && i % 3 != 1;
          for (const at::Tensor& y : replays ? captured_eval(batch.input) : pipe.eval(batch.input)) {
            outputs[is_captured].push_back(y.clone());
          }
        }
        if (is_captured) EXPECT_GE(captured_step.replays(), 4) << captured_step.last_recapture_reason();
        if (is_captured) EXPECT_GE(captured_eval.replays(), 1) << captured_eval.last_recapture_reason();
      }
      ASSERT_EQ(outputs[0].size(), outputs[1].size());
      for (size_t i = 0; i < outputs[0].size(); ++i) expect_equal(outputs[1][i], outputs[0][i], c10::str("output ", i));
    });
  }
}

// A rank that does something else in one call of a new shape is not ready when the others are: they wait for it, though
// all of them replay the first shape already.
TEST(PipelineCaptured, RanksBeginToReplayAnotherShapeTogether) {
  run_ranks(2, [](const Group& group) {
    std::vector<std::vector<at::Tensor>> losses(2);
    for (const bool is_captured : {false, true}) {
      Layer layer = staged::make_layers(2)[size_t(group->getRank())];
      Pipeline pipe(layer, {.group = group, .microbatches = 2, .loss = staged::loss_fn});
      serried::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.05));
      bool does_more = false;
      const auto step = [&](const at::Tensor& input, const at::Tensor& target) {
        optimizer.zero_grad();
        auto all = pipe.step(input, target);
        if (does_more) input.sum();
        optimizer.step();
        return all;
      };
      auto captured = capture(step);
      for (int64_t i = 0; i < 14; ++i) {
        const auto batch = staged::batch_of(i < 6 ? 4 : 6, 2, i);
        does_more = i == 7 && group->getRank() == 1;
        for (const at::Tensor& loss :
             is_captured ? captured(batch.input, batch.target) : step(batch.input, batch.target)) {
          losses[is_captured].push_back(loss.clone());
        }
      }
      if (is_captured) EXPECT_GE(captured.replays(), 5) << captured.last_recapture_reason();
    }
    ASSERT_EQ(losses[0].size(), losses[1].size());
    for (size_t i = 0; i < losses[0].size(); ++i) expect_equal(losses[1][i], losses[0][i], c10::str("loss ", i));
  });
}

}  // namespace
}  // namespace serried::testing
