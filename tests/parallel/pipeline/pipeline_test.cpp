// All schedules against a loop over micro-batches in one process: bit for bit.
#include "serried/parallel/pipeline/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/parallel/pipeline/nets.h"

namespace serried::testing {
namespace {

using namespace staged;

struct Case {
  Schedule schedule;
  int64_t stages_per_rank;
};

const std::vector<Case> kAllSchedules = {{Schedule::GPipe, 1},       {Schedule::OneFOneB, 1},
                                         {Schedule::Interleaved, 2}, {Schedule::Interleaved, 3},
                                         {Schedule::LoopedBFS, 2},   {Schedule::InterleavedZeroBubble, 2},
                                         {Schedule::ZBV, 2},         {Schedule::DualPipeV, 2}};

// Steps whose batches have other rows and another length each time.
void expect_like_loop(const PipelineTable& table, const PipelineOptions& options, const Group& group) {
  const int64_t count = table.microbatches(), rank = group->getRank();
  std::vector<Layer> layers = make_layers(table.stages()), plain = make_layers(table.stages());
  Pipeline pipe(stages_of(table, int(rank), layers), options);
  const bool has_last = table.rank_of(table.stages() - 1) == rank;
  for (int64_t step = 0; step < 3; ++step) {
    const Batch batch = batch_of(count + 3 * step, 2 + step, step);
    const auto losses =
        pipe.step(table.rank_of(0) == rank ? batch.input : at::Tensor(), has_last ? batch.target : at::Tensor());
    const auto expected = run_loop(plain, batch, count);
    ASSERT_EQ(losses.size(), has_last ? size_t(count) : 0u);
    for (size_t i = 0; i < losses.size(); ++i) expect_equal(losses[i], expected[i], "loss");
    for (const int64_t index : table.stages_of(rank)) {
      expect_same_gradients(*layers[size_t(index)], *plain[size_t(index)],
                            c10::str("step ", step, " stage ", index, " of ", table.stages()));
    }
    EXPECT_EQ(pipe.peak_in_flight(), simulate(table).peak_in_flight[size_t(rank)]);
  }
}

TEST(Pipeline, EverySchedulesStepIsBitwiseALoopOverMicroBatches) {
  for (const int world : {1, 2, 3, 4}) {
    for (const Case& each : kAllSchedules) {
      for (const int64_t microbatches : {1, 2, 5, 8}) {
        SCOPED_TRACE(c10::str(to_string(each.schedule), " on ", world, " ranks, ", microbatches, " micro-batches"));
        run_ranks(world, [&](const Group& group) {
          const PipelineOptions options{
              .group = group, .schedule = each.schedule, .microbatches = microbatches, .loss = loss_fn};
          const PipelineTable table = pipeline_table(
              each.schedule, {.ranks = world, .stages_per_rank = each.stages_per_rank, .microbatches = microbatches});
          expect_like_loop(table, options, group);
        });
      }
    }
  }
}

TEST(Pipeline, RunsOverGlooAndSharedMemory) {
  for (const char* backend : {"gloo", "shm"}) {
    for (const Case& each : kAllSchedules) {
      SCOPED_TRACE(c10::str(to_string(each.schedule), " over ", backend));
      const auto on_rank = [&](const Group& group) {
        const PipelineTable table =
            pipeline_table(each.schedule, {.ranks = 3, .stages_per_rank = each.stages_per_rank, .microbatches = 5});
        expect_like_loop(table, {.group = group, .schedule = each.schedule, .microbatches = 5, .loss = loss_fn}, group);
      };
      run_ranks(3, on_rank, {.backend = backend});
    }
  }
}

at::Tensor trimmed(const at::Tensor& x) {
  return x.narrow(1, 0, x.abs().amax({0, 2}).gt(0).sum().item<int64_t>());
}

/// Leaves out the last positions, where nobody has anything.
struct TrimmedImpl : torch::nn::Module {
  explicit TrimmedImpl(const Layer& given) : layer(register_module("layer", given)) {}
  at::Tensor forward(const at::Tensor& x) { return layer(trimmed(x)); }
  Layer layer;
};
TORCH_MODULE(Trimmed);

// Of 8 positions micro-batch i has 1 to 7.
Batch padded_batch(int64_t microbatches, int64_t step) {
  const Batch batch = batch_of(2 * microbatches + 1, 8, step);
  const auto inputs = batch.input.tensor_split(microbatches);
  for (int64_t i = 0; i < microbatches; ++i)
    inputs[size_t(i)].narrow(1, 1 + (3 * i + step) % 7, 7 - (3 * i + step) % 7).zero_();
  return batch;
}

at::Tensor trimmed_loss(const at::Tensor& output, const at::Tensor& target) {
  return loss_fn(output, target.narrow(1, 0, output.size(1)));
}

void run_trimmed_loop(std::vector<Layer>& layers, const Batch& batch, int64_t microbatches) {
  const auto inputs = batch.input.tensor_split(microbatches), targets = batch.target.tensor_split(microbatches);
  std::set<int64_t> lengths;
  for (size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor x = trimmed(inputs[i]);
    lengths.insert(x.size(1));
    for (Layer& layer : layers) x = layer->forward(x);
    (trimmed_loss(x, targets[i]) / double(microbatches)).backward();
  }
  EXPECT_EQ(lengths.size(), size_t(microbatches));
}

TEST(Pipeline, MicroBatchesOfAStepMayDifferInLength) {
  constexpr int64_t kCount = 5;
  for (const Case& each : kAllSchedules) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(c10::str(to_string(each.schedule), " on ", world, " ranks"));
      run_ranks(world, [&](const Group& group) {
        const PipelineTable table = pipeline_table(
            each.schedule, {.ranks = world, .stages_per_rank = each.stages_per_rank, .microbatches = kCount});
        std::vector<Layer> layers = make_layers(table.stages()), plain = make_layers(table.stages());
        std::vector<PipelineStage> stages = stages_of(table, group->getRank(), layers);
        if (table.rank_of(0) == group->getRank()) stages[0] = Trimmed(layers[0]);
        Pipeline pipe(stages,
                      {.group = group, .schedule = each.schedule, .microbatches = kCount, .loss = trimmed_loss});
        for (int64_t step = 0; step < 2; ++step) {
          const Batch batch = padded_batch(kCount, step);
          pipe.step(batch.input, batch.target);
          run_trimmed_loop(plain, batch, kCount);
          for (const int64_t index : table.stages_of(group->getRank())) {
            expect_same_gradients(*layers[size_t(index)], *plain[size_t(index)],
                                  c10::str("step ", step, " stage ", index));
          }
        }
      });
    }
  }
}

/// Notes how its input lies, and gives what lies otherwise.
struct TurnedImpl : torch::nn::Module {
  explicit TurnedImpl(std::vector<int64_t> dims) : order(std::move(dims)) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    strides.push_back(x.strides().vec());
    const at::Tensor y = linear(x);
    std::vector<int64_t> back(order.size());
    for (size_t i = 0; i < order.size(); ++i) back[size_t(order[i])] = int64_t(i);
    return y.permute(order).contiguous().permute(back);
  }
  std::vector<int64_t> order;
  std::vector<std::vector<int64_t>> strides;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Turned);

// Gradients lie as what they are gradients of, which in a loop they need not: their last bits may differ.
TEST(Pipeline, ActivationsLieAsTheyDoInALoop) {
  for (const std::vector<int64_t>& order : {std::vector<int64_t>{2, 0, 1}, {0, 2, 1}, {0, 1, 2}}) {
    const auto make = [&](int64_t stage) { return seeded(uint64_t(stage), [&] { return Turned(order); }); };
    const Batch batch = batch_of(6, 5, 1);
    std::vector<Turned> plain = {make(0), make(1), make(2)};
    for (int64_t i = 0; i < 2; ++i) {
      at::Tensor x = batch.input.tensor_split(2)[size_t(i)];
      for (Turned& stage : plain) x = stage(x);
      (loss_fn(x, batch.target.tensor_split(2)[size_t(i)]) / 2.0).backward();
    }
    run_ranks(3, [&](const Group& group) {
      Turned stage = make(group->getRank());
      Pipeline pipe(stage, {.group = group, .microbatches = 2, .loss = loss_fn});
      pipe.step(batch.input, batch.target);
      EXPECT_EQ(stage->strides, plain[size_t(group->getRank())]->strides);
      expect_close(stage->linear->weight.grad(), plain[size_t(group->getRank())]->linear->weight.grad(), "turned");
    });
  }
}

// Streams between ranks hold 128 KiB: messages of 480 KiB in both directions at once must not wait for each other.
TEST(Pipeline, LargeMessagesDoNotBlockEachOther) {
  for (const Case& each : kAllSchedules) {
    SCOPED_TRACE(to_string(each.schedule));
    run_ranks(2, [&](const Group& group) {
      const PipelineTable table =
          pipeline_table(each.schedule, {.ranks = 2, .stages_per_rank = each.stages_per_rank, .microbatches = 4});
      std::vector<Layer> layers = make_layers(table.stages()), plain = make_layers(table.stages());
      Pipeline pipe(stages_of(table, group->getRank(), layers),
                    {.group = group, .schedule = each.schedule, .microbatches = 4, .loss = loss_fn});
      const Batch batch = batch_of(4, 20'000, 0);
      pipe.step(batch.input, batch.target);
      run_loop(plain, batch, 4);
      for (const int64_t index : table.stages_of(group->getRank())) {
        expect_same_gradients(*layers[size_t(index)], *plain[size_t(index)], c10::str("stage ", index));
      }
    });
  }
}

TEST(Pipeline, RunsTablesOfUsers) {
  // Micro-batches in another order on each rank, split backwards beside whole ones, two stages on the second rank.
  const PipelineTable table = PipelineTable::from_csv(
      "0F0,0F1,0I1,0B0,0W1\n"
      "1F1,2F1,1F0,2I1,1B1,2F0,2W1,2B0,1B0\n");
  run_ranks(2, [&](const Group& group) {
    std::vector<Layer> layers = make_layers(3), plain = make_layers(3);
    Pipeline pipe(stages_of(table, group->getRank(), layers), {.loss = loss_fn, .table = table});
    const Batch batch = batch_of(5, 3, 1);
    const auto losses = pipe.step(batch.input, batch.target);
    const auto expected = run_loop(plain, batch, 2);
    EXPECT_EQ(losses.size(), group->getRank() == 1 ? 2u : 0u);
    for (size_t i = 0; i < losses.size(); ++i) expect_equal(losses[i], expected[i]);
    // Sums of two do not depend on their order.
    for (const int64_t index : table.stages_of(group->getRank())) {
      expect_same_gradients(*layers[size_t(index)], *plain[size_t(index)], c10::str("stage ", index));
    }
  });
}

TEST(Pipeline, TakesHoldersPointersAndVectorsOfAnyModule) {
  run_ranks(2, [](const Group& group) {
    std::vector<Layer> layers = make_layers(4), plain = make_layers(4);
    const Batch batch = batch_of(4, 2, 5);
    const auto expected = run_loop(plain, batch, 2);
    const int rank = group->getRank();
    using torch::nn::AnyModule;
    Pipeline pipe(std::vector<AnyModule>{AnyModule(layers[size_t(rank)]), AnyModule(layers[size_t(rank) + 2])},
                  {.group = group, .schedule = Schedule::Interleaved, .microbatches = 2, .loss = loss_fn});
    const auto losses = pipe.step(batch.input, batch.target);
    if (rank == 1) expect_equal(losses[1], expected[1]);
    expect_same_gradients(*layers[size_t(rank)], *plain[size_t(rank)], "AnyModule");
    EXPECT_EQ(pipe.parameters().size(), 2 * layers[0]->parameters().size());

    std::vector<Layer> halves = make_layers(4);
    torch::nn::Sequential half(halves[size_t(2 * rank)], halves[size_t(2 * rank) + 1]);
    Pipeline by_holder(half, {.group = group, .schedule = Schedule::GPipe, .microbatches = 2, .loss = loss_fn});
    by_holder.step(batch.input, batch.target);
    expect_same_gradients(*halves[size_t(2 * rank)], *plain[size_t(2 * rank)], "Sequential");
    half->zero_grad();
    Pipeline by_pointer(half.ptr(), {.group = group, .microbatches = 2, .loss = loss_fn});
    by_pointer.step(batch.input, batch.target);
    expect_same_gradients(*halves[size_t(2 * rank)], *plain[size_t(2 * rank)], "shared_ptr");
  });
}

TEST(Pipeline, EvalGivesOutputsWhereTheLastStageIs) {
  for (const Case& each : kAllSchedules) {
    run_ranks(2, [&](const Group& group) {
      const PipelineTable table =
          pipeline_table(each.schedule, {.ranks = 2, .stages_per_rank = each.stages_per_rank, .microbatches = 3});
      std::vector<Layer> layers = make_layers(table.stages());
      Pipeline pipe(
          stages_of(table, group->getRank(), layers),
          {.group = group, .schedule = each.schedule, .microbatches = 3, .loss = loss_fn, .keep_outputs = true});
      const Batch batch = batch_of(7, 2, 0);
      const bool has_last = table.rank_of(table.stages() - 1) == group->getRank();
      at::Tensor expected = batch.input;
      {
        const at::NoGradGuard no_grad;
        for (Layer& layer : make_layers(table.stages())) expected = layer->forward(expected);
      }
      const auto outputs = pipe.eval(batch.input);
      EXPECT_EQ(pipe.peak_in_flight(), 0);
      ASSERT_EQ(outputs.size(), has_last ? 3u : 0u);
      if (has_last) expect_close(at::cat(outputs), expected);
      for (const at::Tensor& output : outputs) EXPECT_FALSE(output.requires_grad());
      for (const at::Tensor& parameter : pipe.parameters()) EXPECT_FALSE(parameter.grad().defined());
      pipe.step(batch.input, batch.target);
      ASSERT_EQ(pipe.outputs().size(), has_last ? 3u : 0u);
      if (has_last) expect_close(at::cat(pipe.outputs()), expected);
    });
  }
}

TEST(Pipeline, EvalTakesFewerRowsThanMicroBatches) {
  for (const int64_t rows : {0, 1, 3}) {
    run_ranks(2, [&](const Group& group) {
      std::vector<Layer> layers = make_layers(2);
      Pipeline pipe(layers[size_t(group->getRank())], {.group = group, .microbatches = 4, .loss = loss_fn});
      const Batch batch = batch_of(rows, 2, 0);
      const auto outputs = pipe.eval(batch.input);
      if (group->getRank() == 0) return;
      const at::NoGradGuard no_grad;
      expect_close(at::cat(outputs), layers[1]->forward(make_layers(2)[0]->forward(batch.input)));
    });
  }
}

// Tokens of a text as one column: several rows of the target for each of the input.
TEST(Pipeline, TargetsMayHaveSeveralRowsForEachOfTheInput) {
  run_ranks(2, [](const Group& group) {
    std::vector<Layer> layers = make_layers(2), plain = make_layers(2);
    const Batch batch = batch_of(4, 3, 0);
    const auto expected = run_loop(plain, batch, 2);
    const PipelineLoss loss = [](const at::Tensor& output, const at::Tensor& target) {
      return loss_fn(output.flatten(0, 1), target);
    };
    Pipeline pipe(layers[size_t(group->getRank())], {.group = group, .microbatches = 2, .loss = loss});
    const auto losses = pipe.step(batch.input, batch.target.flatten(0, 1));
    for (size_t i = 0; i < losses.size(); ++i) expect_close(losses[i], expected[i]);
  });
}

TEST(Pipeline, GradientsOfTheSumWhereAskedFor) {
  run_ranks(2, [](const Group& group) {
    std::vector<Layer> layers = make_layers(2), plain = make_layers(2);
    const int rank = group->getRank();
    Pipeline pipe(layers[size_t(rank)], {.group = group, .microbatches = 4, .loss = loss_fn, .scale_gradients = false});
    const Batch batch = batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
    run_loop(plain, batch, 4);  // divides by 4, which is exact
    const auto expected = plain[size_t(rank)]->named_parameters();
    for (const auto& item : layers[size_t(rank)]->named_parameters()) {
      expect_equal(item.value().grad(), expected[item.key()].grad() * 4, item.key());
    }
  });
}

// Stage 0 is frozen, stage 1 counts words: no gradient comes to either.
struct EmbedImpl : torch::nn::Module {
  EmbedImpl() { table = register_module("table", torch::nn::Embedding(5, kWidth)); }
  at::Tensor forward(const at::Tensor& ids) { return table(ids); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Embed);

TEST(Pipeline, StagesThatNeedNoGradientGetNone) {
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::InterleavedZeroBubble}) {
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      Embed embed = seeded(1, [] { return Embed(); });
      std::vector<Layer> layers = make_layers(2);
      for (const at::Tensor& parameter : embed->parameters()) parameter.requires_grad_(false);
      for (const at::Tensor& parameter : layers[0]->parameters()) parameter.requires_grad_(false);
      const PipelineStage stage = rank == 0 ? PipelineStage(embed) : PipelineStage(layers[size_t(rank) - 1]);
      Pipeline pipe(stage, {.group = group, .schedule = schedule, .microbatches = 2, .loss = loss_fn});
      const at::Tensor ids = torch::arange(12).remainder(5).view({4, 3});
      const at::Tensor target = values({4, 3, kWidth}, 2);
      for (int step = 0; step < 2; ++step) pipe.step(ids, target);
      for (const at::Tensor& parameter : pipe.parameters()) EXPECT_EQ(parameter.grad().defined(), rank == 2);
    });
  }
}

TEST(Pipeline, TrainsLikeOneProcess) {
  run_ranks(2, [](const Group& group) {
    std::vector<Layer> layers = make_layers(4), plain = make_layers(4);
    const PipelineTable table = pipeline_table(Schedule::ZBV, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4});
    Pipeline pipe(stages_of(table, group->getRank(), layers),
                  {.group = group, .schedule = Schedule::ZBV, .microbatches = 4, .loss = loss_fn});
    torch::optim::AdamW ours(pipe.parameters(), 0.01);
    std::vector<at::Tensor> all;
    for (Layer& layer : plain) {
      for (const at::Tensor& parameter : layer->parameters()) all.push_back(parameter);
    }
    torch::optim::AdamW theirs(all, 0.01);
    for (int64_t step = 0; step < 20; ++step) {
      const Batch batch = batch_of(6, 2, step);
      ours.zero_grad();
      theirs.zero_grad();
      const auto losses = pipe.step(batch.input, batch.target);
      const auto expected = run_loop(plain, batch, 4);
      if (group->getRank() == 0) expect_equal(losses[3], expected[3], c10::str("step ", step));
      ours.step();
      theirs.step();
    }
    for (const int64_t index : table.stages_of(group->getRank())) {
      const auto expected = plain[size_t(index)]->named_parameters();
      for (const auto& item : layers[size_t(index)]->named_parameters()) {
        expect_equal(item.value(), expected[item.key()], item.key());
      }
    }
  });
}

}  // namespace
}  // namespace serried::testing
