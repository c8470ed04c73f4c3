// Weights that two stages share, against one process that has them once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using staged::kWidth;
using staged::Layer;
using ::testing::HasSubstr;

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(int64_t count = 7) { table = register_module("table", torch::nn::Embedding(count, kWidth)); }
  at::Tensor forward(const at::Tensor& ids) { return table(ids); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Words);

struct ScoresImpl : torch::nn::Module {
  ScoresImpl() { head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, 7).bias(false))); }
  at::Tensor forward(const at::Tensor& x) { return uses ? head(x) : at::constant_pad_nd(x, {0, 1}); }
  torch::nn::Linear head{nullptr};
  bool uses = true;
};
TORCH_MODULE(Scores);

/// The first stage's table as the last one's head.
struct ReadOutImpl : torch::nn::Module {
  explicit ReadOutImpl(const Words& words) { table = register_module("table", words->table); }
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, table->weight); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(ReadOut);

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

struct Parts {
  Words words{nullptr};
  std::vector<Layer> layers;
  Scores scores{nullptr};
};

Parts make_parts(int64_t num_layers) {
  Parts parts;
  parts.words = seeded(5, [] { return Words(); });
  parts.layers = staged::make_layers(num_layers);
  parts.scores = seeded(6, [] { return Scores(); });
  parts.words->to(at::kDouble), parts.scores->to(at::kDouble);
  for (Layer& layer : parts.layers) layer->to(at::kDouble);
  return parts;
}

PipelineStage stage_of(const Parts& parts, int64_t index) {
  if (index == 0) return parts.words;
  if (index <= int64_t(parts.layers.size())) return parts.layers[size_t(index) - 1];
  return parts.scores;
}

template <class Holder>
PipelineStage wrapped(Holder holder, const Group& group) {
  return std::shared_ptr<DistributedDataParallel<Holder>>(
      new DistributedDataParallel(holder, {.process_group = group}));
}

PipelineStage in_ddp(const Parts& parts, int64_t index, const Group& group) {
  if (index == 0) return wrapped(parts.words, group);
  if (index <= int64_t(parts.layers.size())) return wrapped(parts.layers[size_t(index) - 1], group);
  return wrapped(parts.scores, group);
}

at::Tensor whole(const at::Tensor& t) {
  return is_dtensor(t) ? DTensor(t).full_tensor() : t;
}

enum class Data { none, sharded, ddp };

// Those of this rank; with `shares` the last one of all reads out the first one's table.
std::vector<PipelineStage> stages_within(const Parts& parts, const PipelineTable& table, const DeviceMesh& mesh,
                                         Data data, bool shares) {
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(int(mesh.get_local_rank("pp")))) {
    const bool reads_out = shares && index + 1 == table.stages();
    const ReadOut shared(parts.words);
    stages.push_back(reads_out ? PipelineStage(shared) : stage_of(parts, index));
    if (data == Data::sharded) fully_shard(*stages.back().module(), {.mesh = mesh["dp"]});
    if (data == Data::ddp) {
      stages.back() = reads_out ? wrapped(shared, mesh.get_group("dp")) : in_ddp(parts, index, mesh.get_group("dp"));
    }
  }
  return stages;
}

// Two steps without zero_grad between them, whose gradients add up. Tied, or one tensor in both stages.
void expect_tied(Schedule schedule, int64_t stages_per_rank, Data data = Data::none, bool shares = false) {
  SCOPED_TRACE(to_string(schedule));
  const bool has_data = data != Data::none;
  run_ranks(has_data ? 4 : 2, [&](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, has_data ? 2 : 1}, {"pp", "dp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    const PipelineTable table =
        pipeline_table(schedule, {.ranks = 2, .stages_per_rank = stages_per_rank, .microbatches = 3});
    const int64_t last = table.stages() - 1;
    Parts parts = make_parts(table.stages() - 2), plain = make_parts(table.stages() - 2);
    const std::vector<PipelineStage> stages = stages_within(parts, table, mesh, data, shares);
    const std::string prefix = data == Data::ddp ? "module." : "";
    PipelineOptions options{.group = pp, .schedule = schedule, .microbatches = 3, .loss = loss_of};
    if (!shares) options.tied = {{{0, prefix + "table.weight"}, {last, prefix + "head.weight"}}};
    Pipeline pipe(stages, options);
    const at::Tensor& weight = plain.words->table->weight;
    for (int64_t step = 0; step < 2; ++step) {
      const at::Tensor ids = torch::arange(12).mul(step + 2).remainder(7).view({4, 3}),
                       targets = (ids + 1).remainder(7);
      pipe.step(ids, targets);
      const auto in = ids.tensor_split(3), out = targets.tensor_split(3);
      for (size_t i = 0; i < 3; ++i) {
        at::Tensor x = torch::embedding(weight, in[i]);
        for (Layer& layer : plain.layers) x = layer->forward(x);
        (loss_of(torch::linear(x, weight), out[i]) / 3.).backward();
      }
      std::vector<at::Tensor> owners = {parts.words->table->weight};
      if (!shares) owners.push_back(parts.scores->head->weight);
      for (const at::Tensor& own : owners) {
        const bool is_here = table.rank_of(own.is_same(parts.words->table->weight) ? 0 : last) == pp->getRank();
        if (!is_here) continue;
        expect_equal(whole(own.detach()), weight.detach(), "value");
        EXPECT_TRUE(at::allclose(whole(own.grad()), weight.grad(), 1e-9, 1e-9)) << own.grad() << weight.grad();
      }
    }
  });
}

TEST(PipelineTied, GradientsAreSummedOverStages) {
  expect_tied(Schedule::OneFOneB, 1);
  expect_tied(Schedule::Interleaved, 2);
  expect_tied(Schedule::InterleavedZeroBubble, 2);
}

TEST(PipelineTied, BothOnOneRankOfAV) {
  expect_tied(Schedule::ZBV, 2);
  expect_tied(Schedule::DualPipeV, 2);
}

TEST(PipelineTied, OneTensorInTwoStagesOfARankHasTheGradientsOfBoth) {
  for (const Data data : {Data::none, Data::ddp}) {
    expect_tied(Schedule::ZBV, 2, data, /*shares=*/true);
    expect_tied(Schedule::DualPipeV, 2, data, /*shares=*/true);
  }
}

TEST(PipelineTied, FullyShardedOnesExchangeTheirParts) {
  expect_tied(Schedule::OneFOneB, 1, Data::sharded);
  expect_tied(Schedule::ZBV, 2, Data::sharded);
}

TEST(PipelineTied, GradientsInBucketsAddUp) {
  expect_tied(Schedule::OneFOneB, 1, Data::ddp);
  expect_tied(Schedule::ZBV, 2, Data::ddp);
}

TEST(PipelineTied, AStepInWhichOneOwnerHasNoGradientAddsTheOthersToBoth) {
  run_ranks(2, [](const Group& pp) {
    Words words = seeded(5, [] { return Words(); });
    Scores scores = seeded(6, [] { return Scores(); });
    words->to(at::kDouble), scores->to(at::kDouble);
    Pipeline pipe(
        pp->getRank() == 0 ? PipelineStage(words) : PipelineStage(scores),
        {.group = pp, .microbatches = 2, .loss = loss_of, .tied = {{{0, "table.weight"}, {1, "head.weight"}}}});
    const at::Tensor ids = torch::arange(12).remainder(7).view({4, 3}), targets = (ids + 1).remainder(7);
    Words plain = seeded(5, [] { return Words(); });
    plain->to(at::kDouble);
    const at::Tensor weight = plain->table->weight;
    for (const bool uses : {true, false}) {
      scores->uses = uses;
      pipe.step(ids, targets);
      const auto in = ids.tensor_split(2), out = targets.tensor_split(2);
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor x = torch::embedding(weight, in[i]);
        (loss_of(uses ? torch::linear(x, weight) : at::constant_pad_nd(x, {0, 1}), out[i]) / 2.).backward();
      }
    }
    const at::Tensor own = pp->getRank() == 0 ? words->table->weight : scores->head->weight;
    EXPECT_TRUE(at::allclose(own.grad(), weight.grad(), 1e-9, 1e-9)) << pp->getRank();
  });
}

constexpr int kSteps = 4;
constexpr double kMaxNorm = 0.05;  // far below the norms of all steps

struct Trained {
  std::vector<double> norms;
  std::map<int64_t, std::vector<at::Tensor>> parameters;  // by stage; without those of other ranks
};

std::pair<at::Tensor, at::Tensor> words_of(int step) {
  const at::Tensor ids = torch::arange(12).mul(step + 2).remainder(7).view({4, 3});
  return {ids, (ids + 1 + step).remainder(7)};
}

Trained train_alone(int64_t num_layers) {
  Parts parts = make_parts(num_layers);
  std::vector<at::Tensor> parameters = parts.words->parameters();
  for (Layer& layer : parts.layers) {
    for (const at::Tensor& p : layer->parameters()) parameters.push_back(p);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.01));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = words_of(step);
    at::Tensor x = parts.words(ids);
    for (Layer& layer : parts.layers) x = layer->forward(x);
    loss_of(torch::linear(x, parts.words->table->weight), targets).backward();
    trained.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm));
    EXPECT_GT(trained.norms.back(), 2 * kMaxNorm);
    optimizer.step();
  }
  const int64_t last = num_layers + 1;
  trained.parameters[0] = trained.parameters[last] = parts.words->parameters();
  for (int64_t i = 1; i < last; ++i) trained.parameters[i] = parts.layers[size_t(i) - 1]->parameters();
  return trained;
}

enum class Way { shared, shared_and_tied, tied };

Trained train_cut(Schedule schedule, int64_t per_rank, Way way, const Group& pp) {
  const PipelineTable table = pipeline_table(schedule, {.ranks = 2, .stages_per_rank = per_rank, .microbatches = 2});
  const int64_t last = table.stages() - 1;
  Parts parts = make_parts(table.stages() - 2);
  ReadOut shared(parts.words);
  std::vector<PipelineStage> stages;
  for (const int64_t i : table.stages_of(pp->getRank())) {
    stages.push_back(i == last && way != Way::tied ? PipelineStage(shared) : stage_of(parts, i));
  }
  PipelineOptions options{.group = pp, .schedule = schedule, .microbatches = 2, .loss = loss_of};
  if (way == Way::tied) options.tied = {{{0, "table.weight"}, {last, "head.weight"}}};
  if (way == Way::shared_and_tied) options.tied = {{{0, "table.weight"}, {last, "table.weight"}}};
  Pipeline pipe(stages, options);
  AdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(0.01));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = words_of(step);
    pipe.step(ids, targets);
    trained.norms.push_back(clip_grad_norm_(pipe.parameters(), kMaxNorm, 2.0, {.pipeline = pp}));
    optimizer.step();
  }
  const std::vector<int64_t> indices = table.stages_of(pp->getRank());
  for (size_t i = 0; i < indices.size(); ++i) trained.parameters[indices[i]] = stages[i].module()->parameters();
  return trained;
}

void expect_trained_like_alone(Schedule schedule, int64_t per_rank, Way way) {
  const PipelineTable table = pipeline_table(schedule, {.ranks = 2, .stages_per_rank = per_rank, .microbatches = 2});
  SCOPED_TRACE(to_string(schedule));
  const Trained alone = train_alone(table.stages() - 2);
  run_ranks(2, [&](const Group& pp) {
    const Trained cut = train_cut(schedule, per_rank, way, pp);
    for (int i = 0; i < kSteps; ++i) EXPECT_NEAR(cut.norms[size_t(i)], alone.norms[size_t(i)], 1e-9) << i;
    EXPECT_EQ(int64_t(cut.parameters.size()), per_rank);
    for (const auto& [stage, parameters] : cut.parameters) {
      const std::vector<at::Tensor>& expected = alone.parameters.at(stage);
      ASSERT_EQ(parameters.size(), expected.size());
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-9, 1e-9)) << "stage " << stage << ", tensor " << i;
      }
    }
  });
}

// An optimizer steps it once, and the norm has it once.
TEST(PipelineTied, OneTensorInTwoStagesOfAVTrainsLikeOneProcess) {
  for (const Schedule schedule : {Schedule::ZBV, Schedule::DualPipeV}) {
    expect_trained_like_alone(schedule, 2, Way::shared);
    expect_trained_like_alone(schedule, 2, Way::shared_and_tied);
  }
  run_ranks(2, [](const Group& pp) {
    Words words;
    ReadOut shared(words);
    std::vector<Layer> layers = staged::make_layers(2);
    const bool is_first = pp->getRank() == 0;
    Pipeline pipe(
        is_first ? std::vector<PipelineStage>{words, shared} : std::vector<PipelineStage>{layers[0], layers[1]},
        {.group = pp, .schedule = Schedule::ZBV, .microbatches = 2, .loss = loss_of});
    EXPECT_EQ(pipe.parameters().size(), is_first ? 1u : 2 * layers[0]->parameters().size());
  });
}

TEST(PipelineTied, TheNormOfAllGradientsHasThemOnce) {
  expect_trained_like_alone(Schedule::OneFOneB, 1, Way::tied);
  expect_trained_like_alone(Schedule::Interleaved, 2, Way::tied);
  expect_trained_like_alone(Schedule::ZBV, 2, Way::tied);
}

std::string tie_error(const PipelineTie& tie, int64_t num_words = 7) {
  return error_text<c10::ValueError>([&] {
    run_ranks(2, [&](const Group& group) {
      Words words(num_words);
      Scores scores;
      const PipelineStage stage = group->getRank() == 0 ? PipelineStage(words) : PipelineStage(scores);
      Pipeline pipe(stage, {.group = group, .microbatches = 2, .loss = loss_of, .tied = {tie}});
    });
  });
}

TEST(PipelineTied, WhatDoesNotFitIsNamed) {
  EXPECT_THAT(tie_error({{0, "table.weight"}, {1, "head.bias"}}),
              HasSubstr("[Pipeline] there is no \"head.bias\" of stage 1, which is tied"));
  EXPECT_THAT(tie_error({{0, "table.weight"}, {2, "head.weight"}}),
              HasSubstr("there is no stage for \"head.weight\" of stage 2, which is tied: 2 stages"));
  EXPECT_THAT(tie_error({{0, "table.weight"}, {1, "head.weight"}}, 8),
              HasSubstr("\"table.weight\" of stage 0 and \"head.weight\" of stage 1 are tied, and one is f32[8,6], the "
                        "other f32[7,6]\n  fix: tie parameters of equal sizes, dtypes and layouts"));
}

}  // namespace
}  // namespace serried::testing
