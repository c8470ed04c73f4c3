// Pipelines whose stages are data parallel, fully sharded, tensor parallel, and all of that at once.
#include <gtest/gtest.h>

#include <map>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/pipeline/gpt_stage.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using staged::GptStage;
using staged::kAllTables;
using staged::Layer;
using staged::ScheduleCase;

constexpr int64_t kMicrobatches = 4;

PipelineTable table_on_two(const ScheduleCase& each) {
  return pipeline_table(each.schedule,
                        {.ranks = 2, .stages_per_rank = each.stages_per_rank, .microbatches = kMicrobatches});
}

// A step of each data-parallel rank's own batch, in double, or of one batch for all of them, in float.
staged::Batch batch_for(int64_t step, int64_t data_rank, bool is_shared) {
  const staged::Batch batch = staged::batch_of(5, 2, 10 * step + (is_shared ? 0 : data_rank));
  if (is_shared) return batch;
  return {batch.input.to(at::kDouble), batch.target.to(at::kDouble)};
}

using Wrap = std::function<PipelineStage(Layer&, const DeviceMesh& dp)>;

// Three steps on pp=2 dp=2, gradients of the average of both batches: of one batch bit for bit.
void expect_averages(const ScheduleCase& each, bool is_shared, const Wrap& wrap) {
  SCOPED_TRACE(c10::str(to_string(each.schedule), is_shared ? ", one batch" : ", own batches"));
  run_ranks(4, [&](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    const PipelineTable table = table_on_two(each);
    std::vector<Layer> layers = staged::make_layers(table.stages()), plain = staged::make_layers(table.stages());
    for (std::vector<Layer>* all : {&layers, &plain}) {
      for (Layer& layer : *all) layer->to(is_shared ? at::kFloat : at::kDouble);
    }
    std::vector<PipelineStage> stages;
    const std::vector<int64_t> own = table.stages_of(pp->getRank());
    for (const int64_t index : own) stages.push_back(wrap(layers[size_t(index)], mesh["dp"]));
    Pipeline pipe(stages,
                  {.group = pp, .schedule = each.schedule, .microbatches = kMicrobatches, .loss = staged::loss_fn});
    for (int64_t step = 0; step < 3; ++step) {
      const staged::Batch mine = batch_for(step, mesh.get_local_rank("dp"), is_shared);
      pipe.step(mine.input, mine.target);
      for (int64_t rank = 0; rank < (is_shared ? 1 : 2); ++rank) {
        staged::run_loop(plain, batch_for(step, rank, is_shared), kMicrobatches);
      }
      for (const int64_t index : own) {
        const auto expected = plain[size_t(index)]->named_parameters();
        for (const auto& item : layers[size_t(index)]->named_parameters()) {
          at::Tensor gradient = item.value().grad();
          ASSERT_TRUE(gradient.defined()) << item.key();
          if (is_dtensor(gradient)) gradient = DTensor(gradient).full_tensor();
          const std::string what = c10::str("step ", step, " stage ", index, " ", item.key());
          if (is_shared) {
            expect_equal(gradient, expected[item.key()].grad(), what);
          } else {
            EXPECT_TRUE(at::allclose(gradient, expected[item.key()].grad() / 2, 1e-9, 1e-9)) << what;
          }
        }
      }
      for (Layer& layer : plain) layer->zero_grad();
      for (Layer& layer : layers) layer->zero_grad();
    }
  });
}

TEST(PipelineComposition, DataParallelStagesAverageOncePerStep) {
  const Wrap in_ddp = [](Layer& layer, const DeviceMesh& dp) {
    std::shared_ptr<DistributedDataParallel<Layer>> ddp(
        new DistributedDataParallel(layer, {.process_group = dp.get_group()}));
    return PipelineStage(ddp);
  };
  for (const ScheduleCase& each : kAllTables) {
    expect_averages(each, true, in_ddp);
    expect_averages(each, false, in_ddp);
  }
}

struct ScaleImpl : torch::nn::Module {
  at::Tensor factor = register_parameter("factor", at::full({4}, 1.5));
  at::Tensor forward(const at::Tensor& x) { return x * factor; }
};
TORCH_MODULE(Scale);

// The weight part of its backward is one node, next to the parameter.
TEST(PipelineComposition, DataParallelStagesOfOneOpAreAveraged) {
  for (const ScheduleCase& each : kAllTables) {
    SCOPED_TRACE(to_string(each.schedule));
    run_ranks(4, [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
      const Group pp = mesh.get_group("pp");
      const PipelineTable table = table_on_two(each);
      std::vector<Scale> scales(size_t(table.stages())), plain(size_t(table.stages()));
      std::vector<PipelineStage> stages;
      for (const int64_t index : table.stages_of(pp->getRank())) {
        stages.push_back(std::shared_ptr<DistributedDataParallel<Scale>>(
            new DistributedDataParallel(scales[size_t(index)], {.process_group = mesh.get_group("dp")})));
      }
      const auto loss = [](const at::Tensor& y, const at::Tensor& target) { return (y - target).square().mean(); };
      Pipeline pipe(stages, {.group = pp, .schedule = each.schedule, .microbatches = kMicrobatches, .loss = loss});
      const auto batch = [](int64_t rank) { return at::arange(32, at::kFloat).view({8, 4}) / double(10 + rank); };
      pipe.step(batch(mesh.get_local_rank("dp")), at::ones({8, 4}));
      for (int64_t rank = 0; rank < 2; ++rank) {
        at::Tensor x = batch(rank);
        for (Scale& scale : plain) x = scale(x);
        (loss(x, at::ones({8, 4})) / 2.).backward();
      }
      for (const int64_t index : table.stages_of(pp->getRank())) {
        EXPECT_TRUE(at::allclose(scales[size_t(index)]->factor.grad(), plain[size_t(index)]->factor.grad(), 1e-4, 1e-5))
            << "stage " << index;
      }
    });
  }
}

TEST(PipelineComposition, AnEmptyLastMicrobatchIsNamedWhereGradientsAreReduced) {
  for (const bool shards : {false, true}) {
    run_ranks(4, [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
      std::vector<Layer> layers = staged::make_layers(2);
      Layer& layer = layers[size_t(mesh.get_local_rank("pp"))];
      const auto wrapped = [&]() -> PipelineStage {
        if (!shards) {
          return std::shared_ptr<DistributedDataParallel<Layer>>(
              new DistributedDataParallel(layer, {.process_group = mesh.get_group("dp")}));
        }
        fully_shard(*layer, {.mesh = mesh["dp"]});
        return layer;
      };
      int64_t call = 0;
      const auto loss = [&](const at::Tensor& y, const at::Tensor& target) {
        return ++call < 3 ? staged::loss_fn(y, target) : at::zeros({}, y.options());
      };
      Pipeline pipe(wrapped(), {.group = mesh.get_group("pp"), .microbatches = 3, .loss = loss});
      const staged::Batch batch = staged::batch_of(6, 2, 1);
      const std::string text = error_text<c10::Error>([&] { pipe.step(batch.input, batch.target); });
      EXPECT_NE(text.find("needs a gradient in micro-batch 2, whose backward is the stage's last and reduces the "
                          "gradients of all 2 before it\n  fix: let every loss depend on the output, as 0 * "
                          "output.sum() does where a micro-batch has nothing to learn from"),
                std::string::npos)
          << text;
    });
  }
}

TEST(PipelineComposition, FullyShardedStagesReduceOncePerStep) {
  const Wrap sharded = [](Layer& layer, const DeviceMesh& dp) {
    fully_shard(*layer->up, {.mesh = dp});
    fully_shard(*layer, {.mesh = dp});
    return PipelineStage(layer);
  };
  for (const ScheduleCase& each : kAllTables) {
    expect_averages(each, true, sharded);
    expect_averages(each, false, sharded);
  }
}

TEST(PipelineComposition, ADdpStageIsTakenAsItIs) {
  run_ranks(4, [](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
    const Group pp = mesh.get_group("pp"), dp = mesh.get_group("dp");
    std::vector<Layer> layers = staged::make_layers(2);
    Layer stage = layers[size_t(pp->getRank())];
    std::shared_ptr<DistributedDataParallel<Layer>> ddp(new DistributedDataParallel(stage, {.process_group = dp}));
    Pipeline pipe(ddp, {.group = pp, .schedule = Schedule::OneFOneB, .microbatches = 4, .loss = staged::loss_fn});
    for (int64_t step = 0; step < 3; ++step) {
      const staged::Batch batch = staged::batch_of(5, 2, step);
      CommDebugMode comm;
      pipe.step(batch.input, batch.target);
      EXPECT_EQ(comm.count("all_reduce"), 1);
    }
  });
}

TEST(PipelineComposition, FullyShardGathersAndReducesEachBlockOnce) {
  run_ranks(4, [](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    std::vector<Layer> layers = staged::make_layers(2);
    Layer stage = layers[size_t(pp->getRank())];
    fully_shard(*stage->up, {.mesh = mesh["dp"]});
    const FullyShardHandle handle = fully_shard(*stage, {.mesh = mesh["dp"]});
    Pipeline pipe(stage, {.group = pp, .microbatches = 4, .loss = staged::loss_fn});
    for (int64_t step = 0; step < 3; ++step) {
      const staged::Batch batch = staged::batch_of(5, 2, step);
      const FullyShardUsage before = handle.usage();
      pipe.step(batch.input, batch.target);
      const FullyShardUsage after = handle.usage();
      EXPECT_EQ(after.num_gathers - before.num_gathers, 2);
      EXPECT_EQ(after.num_reductions - before.num_reductions, 2);
      EXPECT_EQ(after.gathered_bytes, 0);
      EXPECT_EQ(after.gradient_bytes, 0);
    }
  });
}

using Counts = std::map<std::string, int64_t>;

// Each message is a header and its data. Of the V's borders the middle one is within a rank.
TEST(PipelineComposition, AVSendsActivationsAndGradientsOverTwoOfItsThreeBorders) {
  run_ranks(2, [](const Group& group) {
    const PipelineTable table = table_on_two({Schedule::ZBV, 2});
    std::vector<Layer> layers = staged::make_layers(4);
    Pipeline pipe(staged::stages_of(table, group->getRank(), layers),
                  {.group = group, .schedule = Schedule::ZBV, .microbatches = kMicrobatches, .loss = staged::loss_fn});
    const staged::Batch batch = staged::batch_of(5, 2, 0);
    const CommDebugMode comm;
    pipe.step(batch.input, batch.target);
    EXPECT_EQ(comm.counts(), (Counts{{"send", 2 * 2 * kMicrobatches}, {"recv", 2 * 2 * kMicrobatches}}))
        << comm.report();
    // Activations of stage 0 and gradients of stage 3, or activations of stage 2 and gradients of stage 1.
    const int64_t data = 2 * 5 * 2 * staged::kWidth * 4, headers = 2 * kMicrobatches * 257;
    EXPECT_EQ(comm.bytes("send"), data + headers);
  });
}

TEST(PipelineComposition, TablesMaySayWhenStagesAreGathered) {
  run_ranks(2, [](const Group& world) {
    const PipelineTable table =
        PipelineTable::from_csv("0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0B0,0B1,0RESHARD,0REDUCE_GRAD\n");
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"pp", "dp"}, {.group = world});
    std::vector<Layer> layers = staged::make_layers(1), plain = staged::make_layers(1);
    const FullyShardHandle handle = fully_shard(*layers[0], {.mesh = mesh["dp"]});
    Pipeline pipe(layers[0], {.group = mesh.get_group("pp"), .loss = staged::loss_fn, .table = table});
    const staged::Batch batch = staged::batch_of(4, 2, 0);
    const int64_t before = handle.usage().num_gathers;
    pipe.step(batch.input, batch.target);
    EXPECT_EQ(handle.usage().num_gathers - before, 2);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    staged::run_loop(plain, batch, 2);
    const auto expected = plain[0]->named_parameters();
    for (const auto& item : layers[0]->named_parameters()) {
      expect_equal(DTensor(item.value().grad()).full_tensor(), expected[item.key()].grad(), item.key());
    }
  });
}

struct GptCase {
  ScheduleCase schedule;
  Sizes shape = {2, 1, 2};  // pp, dp, tp
  bool by_sequence = true;
  bool shards = false;
  bool recomputes = false;
};

void expect_stage_like(GptStage& stage, int64_t index, const gpt::Gpt& plain, double num_data) {
  const auto expected = plain->named_parameters();
  for (const auto& item : stage->named_parameters()) {
    std::string name = item.key();
    if (name.starts_with("blocks.0")) name = c10::str("blocks.", index, name.substr(8));
    at::Tensor gradient = item.value().grad();
    ASSERT_TRUE(gradient.defined()) << name;
    if (is_dtensor(gradient)) gradient = DTensor(gradient).full_tensor();
    gpt::expect_near(gradient, expected[name].grad() / num_data, name);
  }
}

void expect_gpt_like_one_process(const GptCase& each) {
  SCOPED_TRACE(to_string(each.schedule.schedule));
  run_ranks(int(each.shape[0] * each.shape[1] * each.shape[2]), [&](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", each.shape, {"pp", "dp", "tp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    const PipelineTable table = table_on_two(each.schedule);
    const gpt::GptOptions model{.layers = table.stages()};
    gpt::Gpt plain = gpt::make_gpt(model), net = gpt::make_gpt(model);
    std::vector<GptStage> own;
    std::vector<PipelineStage> stages;
    for (const int64_t index : table.stages_of(pp->getRank())) {
      own.emplace_back(GptStage(net, index, each.recomputes));
      if (each.shape[2] > 1) parallelize_module(*own.back(), mesh["tp"], own.back()->plan(each.by_sequence));
      if (each.shards) fully_shard(*own.back()->blocks, {.mesh = mesh["dp"]});
      if (each.shards) fully_shard(*own.back(), {.mesh = mesh["dp"]});
      stages.emplace_back(own.back());
    }
    Pipeline pipe(
        stages, {.group = pp, .schedule = each.schedule.schedule, .microbatches = kMicrobatches, .loss = gpt::loss_of});
    const ImplicitReplication targets_are_whole;
    for (int step = 0; step < 2; ++step) {
      const auto batch_of = [&](int64_t rank) { return gpt::batch_of(int(rank) + 10 * step, 5 + step); };
      const gpt::Batch mine = batch_of(mesh.get_local_rank("dp"));
      pipe.step(mine.ids, mine.targets);
      for (int64_t rank = 0; rank < each.shape[1]; ++rank) {
        const gpt::Batch batch = batch_of(rank);
        const auto ids = batch.ids.tensor_split(kMicrobatches), targets = batch.targets.tensor_split(kMicrobatches);
        for (size_t i = 0; i < ids.size(); ++i) {
          (gpt::loss_of(plain(ids[i]), targets[i]) / double(kMicrobatches)).backward();
        }
      }
      for (size_t i = 0; i < own.size(); ++i) {
        expect_stage_like(own[i], table.stages_of(pp->getRank())[i], plain, double(each.shape[1]));
      }
    }
  });
}

TEST(PipelineComposition, DTensorsTravelBetweenTensorParallelStages) {
  for (const ScheduleCase& each : kAllTables) {
    expect_gpt_like_one_process({.schedule = each});
    expect_gpt_like_one_process({.schedule = each, .by_sequence = false});
  }
}

TEST(PipelineComposition, WithFullyShardAndTensorParallelOnEightRanks) {
  for (const ScheduleCase& each : kAllTables) {
    expect_gpt_like_one_process({.schedule = each, .shape = {2, 2, 2}, .shards = true});
  }
}

// Of a micro-batch in a stage: sums of `out` and `down` and, in backward, of the gradients of what comes into the
// layers before them. The first one adds up words; the last one three numbers of the loss over a cut vocabulary, and
// the gradient of what comes into the head.
int64_t sums_of_a_microbatch(int64_t stage, int64_t num_stages) {
  return 4 + int64_t(stage == 0) + (stage + 1 == num_stages ? 4 : 0);
}

TEST(PipelineComposition, EightRanksCommunicateWhatTheirStrategiesNeed) {
  for (const ScheduleCase& each : {ScheduleCase{Schedule::OneFOneB, 1}, ScheduleCase{Schedule::ZBV, 2}}) {
    run_ranks(8, [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, {.group = world});
      const Group pp = mesh.get_group("pp");
      const PipelineTable table = table_on_two(each);
      gpt::Gpt net = gpt::make_gpt({.layers = table.stages()});
      std::vector<PipelineStage> stages;
      int64_t sums = 0;
      for (const int64_t index : table.stages_of(pp->getRank())) {
        GptStage stage(net, index, false);
        parallelize_module(*stage, mesh["tp"], stage->plan(false));
        fully_shard(*stage, {.mesh = mesh["dp"]});
        stages.emplace_back(stage);
        sums += kMicrobatches * sums_of_a_microbatch(index, table.stages());
      }
      Pipeline pipe(stages,
                    {.group = pp, .schedule = each.schedule, .microbatches = kMicrobatches, .loss = gpt::loss_of});
      const ImplicitReplication targets_are_whole;
      const gpt::Batch batch = gpt::batch_of(1, 5);
      const int64_t per_rank = each.stages_per_rank, messages = 2 * per_rank * kMicrobatches;
      for (int step = 0; step < 2; ++step) {
        const CommDebugMode comm;
        pipe.step(batch.ids, batch.targets);
        EXPECT_EQ(comm.counts(), (Counts{{"all_gather", per_rank},
                                         {"reduce_scatter", per_rank},
                                         {"all_reduce", sums},
                                         {"send", messages},
                                         {"recv", messages}}))
            << comm.report();
      }
    });
  }
}

TEST(PipelineComposition, WithRecomputeInStages) {
  for (const ScheduleCase& each : kAllTables) {
    expect_gpt_like_one_process({.schedule = each, .shape = {2, 1, 1}, .recomputes = true});
  }
  expect_gpt_like_one_process({.schedule = {Schedule::ZBV, 2}, .shape = {2, 2, 1}, .shards = true, .recomputes = true});
}

}  // namespace
}  // namespace serried::testing
