// Twenty steps of AdamW with clipping, by every kind of stage: the training of one process, one norm on all ranks.
#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "serried/comm/collectives/objects.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/pipeline/gpt_stage.h"
#include "tests/parallel/pipeline/nets.h"

namespace serried::testing::clipped {
namespace {

using staged::GptStage;
using staged::ScheduleCase;

constexpr int kSteps = 20;
constexpr int64_t kMicrobatches = 4;
constexpr double kMaxNorm = 0.3;  // below the norms of all steps
const torch::optim::AdamWOptions kOptions = torch::optim::AdamWOptions(0.01);

enum class Within { nothing, ddp, sharded, tensor_parallel, sharded_and_tensor_parallel };

struct Shape {
  int64_t data, tensor;
};

Shape shape_of(Within within) {
  const bool is_cut = within == Within::tensor_parallel || within == Within::sharded_and_tensor_parallel;
  const bool has_data_ranks = within != Within::nothing && within != Within::tensor_parallel;
  return {has_data_ranks ? 2 : 1, is_cut ? 2 : 1};
}

gpt::Batch batch_of(int step, int64_t data_rank) {
  return gpt::batch_of(step + 100 * int(data_rank), 6);
}

struct Training {
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;  // by their names in the whole
};

Training train_alone(int64_t num_stages, int64_t num_data) {
  gpt::Gpt net = gpt::make_gpt({.layers = num_stages});
  torch::optim::AdamW optimizer(net->parameters(), kOptions);
  Training training;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < num_data; ++rank) {
      const gpt::Batch batch = batch_of(step, rank);
      const auto ids = batch.ids.tensor_split(kMicrobatches), targets = batch.targets.tensor_split(kMicrobatches);
      for (size_t i = 0; i < ids.size(); ++i) {
        (gpt::loss_of(net(ids[i]), targets[i]) / double(kMicrobatches * num_data)).backward();
      }
    }
    training.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm));
    EXPECT_GT(training.norms.back(), kMaxNorm);
    optimizer.step();
  }
  for (const auto& item : net->named_parameters()) training.parameters[item.key()] = item.value().detach();
  return training;
}

// Once for all tables. On a thread of its own, as the ranks: the main one shares its ops out to others.
const Training& alone_with(int64_t num_stages, int64_t num_data) {
  static std::map<std::pair<int64_t, int64_t>, Training> all;
  const auto [found, is_new] = all.try_emplace({num_stages, num_data});
  if (is_new) run_ranks(1, [&, place = found](const Group&) { place->second = train_alone(num_stages, num_data); });
  return found->second;
}

PipelineStage stage_within(GptStage& stage, const DeviceMesh& mesh, Within within) {
  if (within == Within::ddp) {
    return std::make_shared<DistributedDataParallel<GptStage>>(stage,
                                                               DDPOptions{.process_group = mesh.get_group("dp")});
  }
  const Shape shape = shape_of(within);
  if (shape.tensor > 1) parallelize_module(*stage, mesh["tp"], stage->plan(false));
  if (shape.data > 1) {
    fully_shard(*stage->blocks, {.mesh = mesh["dp"]});
    fully_shard(*stage, {.mesh = mesh["dp"]});
  }
  return stage;
}

void expect_equal_bits(double norm, const Group& world) {
  for (const int64_t bits : all_gather_object(std::bit_cast<int64_t>(norm), world)) {
    EXPECT_EQ(bits, std::bit_cast<int64_t>(norm));
  }
}

void expect_like_alone(const ScheduleCase& each, Within within) {
  SCOPED_TRACE(c10::str(to_string(each.schedule), " with ", int(within)));
  const Shape shape = shape_of(within);
  const PipelineTable table = pipeline_table(
      each.schedule, {.ranks = 2, .stages_per_rank = each.stages_per_rank, .microbatches = kMicrobatches});
  const Training& alone = alone_with(table.stages(), shape.data);
  run_ranks(int(2 * shape.data * shape.tensor), [&](const Group& world) {
    const DeviceMesh mesh =
        init_device_mesh("cpu", {2, shape.data, shape.tensor}, {"pp", "dp", "tp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    gpt::Gpt net = gpt::make_gpt({.layers = table.stages()});
    std::map<int64_t, GptStage> own;
    std::vector<PipelineStage> stages;
    for (const int64_t i : table.stages_of(pp->getRank())) {
      stages.push_back(stage_within(own.emplace(i, GptStage(net, i, false)).first->second, mesh, within));
    }
    Pipeline pipe(stages,
                  {.group = pp, .schedule = each.schedule, .microbatches = kMicrobatches, .loss = gpt::loss_of});
    AdamW optimizer(pipe.parameters(), kOptions);
    const ImplicitReplication targets_are_whole;
    for (int step = 0; step < kSteps; ++step) {
      const gpt::Batch mine = batch_of(step, mesh.get_local_rank("dp"));
      optimizer.zero_grad();
      pipe.step(mine.ids, mine.targets);
      const double norm = clip_grad_norm_(pipe.parameters(), kMaxNorm, 2.0, {.pipeline = pp});
      EXPECT_NEAR(norm, alone.norms[size_t(step)], 1e-9) << step;
      expect_equal_bits(norm, world);
      optimizer.step();
    }
    for (auto& [i, stage] : own) {
      for (const auto& item : stage->named_parameters()) {
        std::string name = item.key();
        if (name.starts_with("blocks.0")) name = c10::str("blocks.", i, name.substr(8));
        gpt::expect_near(full(item.value().detach()), alone.parameters.at(name), name);
      }
    }
  });
}

TEST(PipelineClipped, PlainStages) {
  for (const ScheduleCase& each : staged::kAllTables) expect_like_alone(each, Within::nothing);
}

TEST(PipelineClipped, DataParallelStages) {
  for (const ScheduleCase& each : staged::kAllTables) expect_like_alone(each, Within::ddp);
}

TEST(PipelineClipped, FullyShardedStages) {
  for (const ScheduleCase& each : staged::kAllTables) expect_like_alone(each, Within::sharded);
}

TEST(PipelineClipped, TensorParallelStages) {
  for (const ScheduleCase& each : staged::kAllTables) expect_like_alone(each, Within::tensor_parallel);
}

// Tables differ in when stages reduce: where backwards are whole, split, and of several stages of a rank.
const std::vector<ScheduleCase> kSomeTables = {{Schedule::OneFOneB, 1}, {Schedule::Interleaved, 2}, {Schedule::ZBV, 2}};

TEST(PipelineClipped, FullyShardedTensorParallelStagesOnEightRanks) {
  for (const ScheduleCase& each : kSomeTables) expect_like_alone(each, Within::sharded_and_tensor_parallel);
}

}  // namespace
}  // namespace serried::testing::clipped
