// Weights that two stages share, against one process that has them once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

// Two steps without zero_grad between them, whose gradients add up.
enum class Data { none, sharded, ddp };

void expect_tied(Schedule schedule, int64_t stages_per_rank, Data data = Data::none) {
  SCOPED_TRACE(to_string(schedule));
  const bool has_data = data != Data::none;
  run_ranks(has_data ? 4 : 2, [&](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, has_data ? 2 : 1}, {"pp", "dp"}, {.group = world});
    const Group pp = mesh.get_group("pp");
    const PipelineTable table =
        pipeline_table(schedule, {.ranks = 2, .stages_per_rank = stages_per_rank, .microbatches = 3});
    const int64_t last = table.stages() - 1;
    Parts parts = make_parts(table.stages() - 2), plain = make_parts(table.stages() - 2);
    std::vector<PipelineStage> stages;
    for (const int64_t index : table.stages_of(pp->getRank())) {
      stages.push_back(stage_of(parts, index));
      if (data == Data::sharded) fully_shard(*stages.back().module(), {.mesh = mesh["dp"]});
      if (data == Data::ddp) stages.back() = in_ddp(parts, index, mesh.get_group("dp"));
    }
    const std::string prefix = data == Data::ddp ? "module." : "";
    Pipeline pipe(stages, {.group = pp,
                           .schedule = schedule,
                           .microbatches = 3,
                           .loss = loss_of,
                           .tied = {{{0, prefix + "table.weight"}, {last, prefix + "head.weight"}}}});
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
      for (const at::Tensor& own : {parts.words->table->weight, parts.scores->head->weight}) {
        const bool is_here = table.rank_of(own.is_same(parts.words->table->weight) ? 0 : last) == pp->getRank();
        if (!is_here) continue;
        expect_equal(whole(own.detach()), weight.detach(), "value");
        EXPECT_TRUE(at::allclose(whole(own.grad()), weight.grad(), 1e-4, 1e-6)) << own.grad() << weight.grad();
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
    Pipeline pipe(
        pp->getRank() == 0 ? PipelineStage(words) : PipelineStage(scores),
        {.group = pp, .microbatches = 2, .loss = loss_of, .tied = {{{0, "table.weight"}, {1, "head.weight"}}}});
    const at::Tensor ids = torch::arange(12).remainder(7).view({4, 3}), targets = (ids + 1).remainder(7);
    const at::Tensor weight = seeded(5, [] { return Words(); })->table->weight;
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
    EXPECT_TRUE(at::allclose(own.grad(), weight.grad(), 1e-4, 1e-6)) << pp->getRank();
  });
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
