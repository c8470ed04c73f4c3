// What does not fit is said on every rank, before anything waits for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <mutex>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/own_tags.h"
#include "serried/parallel/pipeline/messages.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using staged::Layer;
using staged::loss_fn;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// The texts of all ranks, each of which has to fail with an `Exception`.
template <class Exception, class Fn>
std::vector<std::string> texts_of_all(int world, const Fn& fn) {
  std::vector<std::string> texts(size_t(world), "");
  run_ranks(world,
            [&](const Group& group) { texts[size_t(group->getRank())] = error_text<Exception>([&] { fn(group); }); });
  return texts;
}

Layer layer_of(const Group& group) {
  return staged::make_layers(group->getSize())[size_t(group->getRank())];
}

TEST(PipelineErrors, TablesThatWaitForEverShowTheCycleOnEveryRank) {
  const PipelineTable table = PipelineTable::from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n");
  const auto texts = texts_of_all<c10::ValueError>(
      2, [&](const Group& group) { Pipeline(layer_of(group), {.group = group, .loss = loss_fn, .table = table}); });
  EXPECT_THAT(texts,
              Each(HasSubstr("[simulate] the table waits for ever: rank 0 waits at B s0 m0 for rank 1 (B s1 m0), "
                             "which waits at F s1 m1 for rank 0 (F s0 m1)")));
}

TEST(PipelineErrors, TablesOfOtherSizesAreRefused) {
  const PipelineTable table = PipelineTable::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_THAT(texts_of_all<c10::ValueError>(
                  3, [&](const Group& group) { Pipeline(layer_of(group), {.group = group, .table = table}); }),
              Each(HasSubstr("[Pipeline] the table has 2 rows, and the group 3 ranks\n  fix: give every rank of the "
                             "group a row")));
  EXPECT_THAT(
      texts_of_all<c10::ValueError>(
          2,
          [&](const Group& group) { Pipeline(layer_of(group), {.group = group, .microbatches = 1, .table = table}); }),
      Each(HasSubstr("[Pipeline] the table has 2 micro-batches, and microbatches is 1\n  fix: pass 2, or none")));
}

TEST(PipelineErrors, MicroBatchesAndModulesAreCounted) {
  EXPECT_THAT(texts_of_all<c10::ValueError>(2, [](const Group& group) { Pipeline(layer_of(group), {.group = group}); }),
              Each(HasSubstr("[Pipeline] microbatches is 0\n  fix: pass 1 or more")));
  EXPECT_THAT(
      texts_of_all<c10::ValueError>(1,
                                    [](const Group& group) {
                                      const PipelineStage stage = layer_of(group);
                                      Pipeline(std::vector<PipelineStage>{stage, stage},
                                               {.group = group, .schedule = Schedule::GPipe, .microbatches = 2});
                                    }),
      Each(HasSubstr("[Pipeline] GPipe has 1 stage per rank, and 2 modules were given\n  fix: pass one module, or "
                     "a schedule with several stages per rank: Interleaved, LoopedBFS")));
  EXPECT_THAT(
      texts_of_all<c10::ValueError>(2,
                                    [](const Group& group) {
                                      Pipeline(layer_of(group),
                                               {.group = group, .schedule = Schedule::ZBV, .microbatches = 4});
                                    }),
      Each(HasSubstr("[Pipeline] ZBV has 2 stages per rank, and 1 module was given\n  fix: pass a vector of two "
                     "AnyModules: of p ranks, rank r has stages r and 2p - 1 - r")));
  const PipelineTable table = PipelineTable::from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n");
  const auto texts = texts_of_all<c10::ValueError>(
      2, [&](const Group& group) { Pipeline(layer_of(group), {.group = group, .table = table}); });
  EXPECT_THAT(texts[0],
              HasSubstr("[Pipeline] rank 0 has 2 stages in the table, and 1 module was given\n  fix: pass one "
                        "module for each stage of the rank, in ascending order"));
  EXPECT_THAT(texts[1], HasSubstr("[Pipeline] rank 0 of the pipeline cannot begin: [Pipeline] rank 0 has 2 stages"));
}

TEST(PipelineErrors, RanksThatRunDifferentTablesFindOut) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    Pipeline(layer_of(group), {.group = group, .microbatches = 2 + group->getRank(), .loss = loss_fn});
  });
  EXPECT_THAT(texts,
              Each(HasSubstr("[Pipeline] ranks run different pipelines: rank 0 2 stages, 2 micro-batches, "
                             "1F1B, gradients of the mean, nothing tied; rank 1 2 stages, 3 micro-batches, 1F1B, "
                             "gradients of the mean, nothing tied\n  fix: pass the same")));
}

TEST(PipelineErrors, RanksOfWhichOneTracesFindOut) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    Pipeline(layer_of(group), {.group = group, .microbatches = 2, .loss = loss_fn, .trace = group->getRank() == 1});
  });
  EXPECT_THAT(texts, Each(HasSubstr("gradients of the mean, nothing tied; rank 1 2 stages, 2 micro-batches, 1F1B, "
                                    "gradients of the mean, nothing tied, .trace\n  fix: pass the same")));
}

TEST(PipelineErrors, RanksThatTieOtherParametersFindOut) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const PipelineTie up{{0, "up.weight"}, {1, "up.weight"}}, down{{0, "down.weight"}, {1, "down.weight"}};
    Pipeline(layer_of(group),
             {.group = group, .microbatches = 2, .loss = loss_fn, .tied = {group->getRank() == 0 ? up : down}});
  });
  EXPECT_THAT(texts, Each(HasSubstr("tied: {0 \"up.weight\", 1 \"up.weight\"}; rank 1 ")));
  EXPECT_THAT(texts, Each(HasSubstr("tied: {0 \"down.weight\", 1 \"down.weight\"}\n  fix: pass the same")));
}

// Their messages are of the same shapes: nothing else tells them apart.
TEST(PipelineErrors, PipelinesOfOneGroupThatRanksCallInAnotherOrderAreNamed) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const PipelineOptions options{.group = group, .microbatches = 2, .loss = loss_fn};
    Pipeline first(layer_of(group), options), second(layer_of(group), options);
    const staged::Batch batch = staged::batch_of(4, 3, 0);
    for (int i = 0; i < 2; ++i) (i == group->getRank() ? first : second).step(batch.input, batch.target);
  });
  EXPECT_THAT(texts, Each(HasSubstr("[Pipeline] pipeline ")));
  EXPECT_THAT(texts, Each(HasSubstr("call step() and eval() of several pipelines in the same order on every rank")));
}

TEST(PipelineErrors, APipelineOnAGroupWhereAStepHasFailedIsRefused) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const PipelineOptions options{.group = group, .microbatches = 2, .loss = loss_fn};
    const staged::Batch batch = staged::batch_of(4, 3, 0);
    {
      Pipeline pipe(layer_of(group), options);
      EXPECT_THROW(pipe.step(batch.input, group->getRank() == 1 ? at::Tensor() : batch.target), c10::ValueError);
    }
    Pipeline next(layer_of(group), options);
  });
  EXPECT_THAT(texts, Each(HasSubstr("[Pipeline] a step on this group has failed at ")));
  EXPECT_THAT(texts, Each(HasSubstr("fix: make a new group for the new Pipeline, on every rank")));
}

TEST(PipelineErrors, AStageHasParameters) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const PipelineStage stage = group->getRank() == 0 ? PipelineStage(layer_of(group))
                                                      : PipelineStage(torch::nn::Sequential(torch::nn::ReLU()));
    Pipeline(stage, {.group = group, .microbatches = 2, .loss = loss_fn});
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("stage 1 (torch::nn::SequentialImpl) has no parameters"),
                                HasSubstr("fix: put it into the stage before or after it"))));
  EXPECT_EQ(error_text<c10::ValueError>([] { PipelineStage(torch::nn::AnyModule()); }),
            "[Pipeline] a stage has no module: it is empty\n  fix: pass a module that was constructed");
}

struct Given {
  std::vector<int> loss_on = {0, 1};
  at::Tensor input = staged::batch_of(4, 2, 0).input;
  at::Tensor target = staged::batch_of(4, 2, 0).target;
};

// One rank finds out, both raise, and the pipeline says so afterwards.
std::vector<std::string> step_texts(const Given& given) {
  return texts_of_all<c10::ValueError>(2, [&](const Group& group) {
    PipelineOptions options{.group = group, .microbatches = 2};
    for (const int rank : given.loss_on) {
      if (rank == group->getRank()) options.loss = loss_fn;
    }
    Pipeline pipe(layer_of(group), options);
    const std::string first = error_text<c10::ValueError>([&] { pipe.step(given.input, given.target); });
    EXPECT_THAT(error_text<c10::ValueError>([&] { pipe.step(given.input, given.target); }),
                HasSubstr("[Pipeline] an earlier step failed: at "));
    barrier(group);
    throw c10::ValueError(first);
  });
}

TEST(PipelineErrors, LossAndTargetBelongToTheLastStage) {
  for (const std::vector<int>& loss_on : {std::vector<int>{}, {0}}) {
    const auto no_loss = step_texts({.loss_on = loss_on});
    EXPECT_THAT(no_loss,
                Each(HasSubstr("[Pipeline::step] rank 1 has the last stage and no loss\n  fix: pass .loss there, "
                               "or call eval() for outputs")));
    EXPECT_THAT(no_loss[0], HasSubstr("[Pipeline] rank 1 failed at F s1 m0: "));
  }
  EXPECT_THAT(
      step_texts({.target = {}}),
      Each(HasSubstr("[Pipeline::step] the target is undefined on rank 1, which has the last stage\n  fix: pass "
                     "the target there")));
}

TEST(PipelineErrors, TheInputBelongsToTheFirstStage) {
  EXPECT_THAT(
      step_texts({.input = {}}),
      Each(HasSubstr("[Pipeline::step] the input is undefined on rank 0, which has the first stage\n  fix: pass "
                     "the batch there")));
  EXPECT_THAT(
      step_texts({.input = torch::ones({1, 2, staged::kWidth})}),
      Each(HasSubstr("[Pipeline::step] f32[1,2,6] cannot be cut into 2 micro-batches along dim 0\n  fix: pass 2 "
                     "rows or more, or fewer micro-batches")));
}

TEST(PipelineErrors, ALossIsOneNumber) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    Pipeline pipe(layer_of(group), {.group = group,
                                    .microbatches = 2,
                                    .loss = [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square(); }});
    const auto batch = staged::batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
  });
  EXPECT_THAT(texts, Each(HasSubstr("[Pipeline] the loss of micro-batch 0 is f32[2,2,6], not one number\n  fix: reduce "
                                    "it: mean() or sum()")));
}

// Nothing would be learnt, in silence. One micro-batch may have nothing to learn from.
TEST(PipelineErrors, SomeLossNeedsAGradient) {
  for (const bool is_inference : {false, true}) {
    const auto texts = texts_of_all<c10::ValueError>(2, [&](const Group& group) {
      const auto loss = [&](const at::Tensor& y, const at::Tensor& t) {
        return is_inference ? loss_fn(y, t) : loss_fn(y.detach(), t);
      };
      Pipeline pipe(layer_of(group), {.group = group, .microbatches = 2, .loss = loss});
      const c10::InferenceMode mode(is_inference);
      const auto batch = staged::batch_of(4, 2, 0);
      pipe.step(batch.input, batch.target);
    });
    EXPECT_THAT(texts,
                Each(HasSubstr("[Pipeline::step] no loss of the step needs a gradient, and parameters of stage 1 "
                               "do\n  fix: let the loss depend on the output, without detach(), NoGradGuard or "
                               "InferenceMode")));
  }
  run_ranks(2, [](const Group& group) {
    int64_t call = 0;
    const auto loss = [&](const at::Tensor& y, const at::Tensor& t) {
      return call++ == 1 ? at::zeros({}) : loss_fn(y, t);
    };
    Layer layer = layer_of(group);
    Pipeline pipe(layer, {.group = group, .microbatches = 2, .loss = loss});
    const auto batch = staged::batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
    EXPECT_TRUE(layer->scale.grad().defined());
  });
}

TEST(PipelineErrors, StagesThatDisagreeAboutShapesAreNamedOnEveryRank) {
  const auto texts = texts_of_all<c10::Error>(3, [](const Group& group) {
    const PipelineStage stage =
        group->getRank() == 1 ? PipelineStage(torch::nn::Linear(9, 6)) : PipelineStage(layer_of(group));
    Pipeline pipe(stage, {.group = group, .microbatches = 2, .loss = loss_fn});
    const auto batch = staged::batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
  });
  EXPECT_THAT(texts[1],
              AllOf(HasSubstr("mat1 and mat2 shapes cannot be multiplied"),
                    HasSubstr("at F s1 m0 on rank 1 of the pipeline, whose input f32[2,2,6] is what stage 0 on "
                              "rank 0 gives")));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(texts[size_t(rank)], AllOf(HasSubstr("[Pipeline] rank 1 failed at F s1 m0: "),
                                           HasSubstr("mat1 and mat2 shapes cannot be multiplied"),
                                           HasSubstr(c10::str(" s", rank, " m0 on rank ", rank, " of the pipeline"))));
  }
}

TEST(PipelineErrors, StagesThatDisagreeAboutPlacementsAreNamed) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 1}, {"pp", "tp"}, {.group = group});
    torch::nn::Sequential stage(torch::nn::Linear(6, 6));
    if (group->getRank() == 0) parallelize_module(*stage, mesh["tp"], {{"0", ColwiseParallel()}});
    Pipeline pipe(stage, {.group = mesh.get_group("pp"), .microbatches = 2, .loss = loss_fn});
    const auto batch = staged::batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
  });
  EXPECT_THAT(texts,
              Each(HasSubstr("[Pipeline] what F s0 m0 on rank 0 made is f32[2,2,6] S2 on 1, and the stage that gets "
                             "it is on no mesh\n  fix: give this stage parameters on a mesh, pass .mesh, or make it "
                             "plain")));
}

TEST(PipelineErrors, MeshesOfStagesHaveOneShape) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 1, 1}, {"pp", "dp", "tp"}, {.group = group});
    torch::nn::Sequential stage(torch::nn::Linear(6, 6));
    parallelize_module(*stage, mesh["tp"], {{"0", ColwiseParallel()}});
    PipelineOptions options{.group = mesh.get_group("pp"), .microbatches = 2, .loss = loss_fn};
    if (group->getRank() == 1) options.mesh = mesh.slice({"dp", "tp"});
    Pipeline pipe(stage, options);
    const auto batch = staged::batch_of(4, 2, 0);
    pipe.step(batch.input, batch.target);
  });
  EXPECT_THAT(texts,
              Each(HasSubstr("[Pipeline] what F s0 m0 on rank 0 made is f32[2,2,6] S2 on 1, and the stage that gets "
                             "it is on mesh dp=1 tp=1\n  fix: give all stages meshes of one shape")));
}

TEST(PipelineErrors, RanksThatCallDifferentThingsFindOut) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    Pipeline pipe(layer_of(group), {.group = group, .microbatches = 1, .loss = loss_fn});
    const auto batch = staged::batch_of(4, 2, 0);
    // Rank 0 goes on with a second batch, of which rank 1 takes the first message for that of its own first.
    if (group->getRank() == 0) pipe.eval(batch.input);
    pipe.step(batch.input, batch.target);
    if (group->getRank() == 1) throw c10::ValueError("went on");
  });
  EXPECT_THAT(texts[0], HasSubstr("step 2 of this rank meets step 1 of rank 1 at B s1 m0"));
}

/// Fails in the backward of micro-batch `fails_in`.
struct FailingImpl : torch::nn::Module {
  FailingImpl() { weight = register_parameter("weight", torch::ones({staged::kWidth})); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x * weight;
    if (num_forwards++ == fails_in) y.register_hook([](const at::Tensor&) { throw c10::ValueError("gave up"); });
    return y;
  }
  at::Tensor weight;
  int64_t fails_in = -1, num_forwards = 0;
};
TORCH_MODULE(Failing);

// It has done all its actions, which another one has not, and waits for what comes behind them.
TEST(PipelineErrors, ARankThatIsDoneWithItsActionsSaysSo) {
  std::string text;
  const std::string first = error_text<c10::Error>([&] {
    run_ranks(2, [&](const Group& group) {
      Failing stage;
      if (group->getRank() == 0) stage->fails_in = 2;
      Pipeline pipe(stage,
                    {.group = group, .microbatches = 3, .loss = loss_fn, .tied = {{{0, "weight"}, {1, "weight"}}}});
      const staged::Batch batch = staged::batch_of(3, 2, 0);
      if (group->getRank() == 0) pipe.step(batch.input, batch.target);
      text = error_text<c10::Error>([&] { pipe.step(batch.input, batch.target); });
    });
  });
  EXPECT_THAT(first, HasSubstr("gave up"));
  EXPECT_THAT(text, HasSubstr("(after B s1 m2 on rank 1 of the pipeline, while gradients of tied parameters were added "
                              "up)"));
}

// The first stage sends nothing behind its forwards: nobody waits for it when its backward fails. Messages of 960 KiB
// are on their way to it until it takes them.
TEST(PipelineErrors, AFailureAfterTheLastMessageIsToldInTheNextStep) {
  for (const char* backend : {"threads", "shm", "gloo"}) {
    for (const int64_t length : {2, 20'000}) {
      std::vector<std::string> texts(3);
      std::latch all_know(3);
      const auto on_rank = [&](const Group& group) {
        const size_t rank = size_t(group->getRank());
        Failing stage;
        if (rank == 0) stage->fails_in = 1;
        Pipeline pipe(stage, {.group = group, .schedule = Schedule::GPipe, .microbatches = 6, .loss = loss_fn});
        const staged::Batch batch = staged::batch_of(12, length, 0);
        if (rank > 0) EXPECT_EQ(pipe.step(batch.input, batch.target).size(), rank == 2 ? 6u : 0u);
        texts[rank] = error_text<c10::Error>([&] { pipe.step(batch.input, batch.target); });
        all_know.arrive_and_wait();
      };
      run_ranks(3, on_rank, {.backend = backend, .timeout = std::chrono::seconds(20)});
      EXPECT_THAT(texts[0], AllOf(HasSubstr("gave up"), HasSubstr("at B s0 m1 on rank 0 of the pipeline"))) << backend;
      for (const size_t rank : {1, 2}) {
        EXPECT_THAT(texts[rank], AllOf(HasSubstr("[Pipeline] rank 0 failed at B s0 m1: gave up"),
                                       HasSubstr(c10::str("at F s", rank, " m0 on rank ", rank, " of the pipeline"))))
            << backend;
      }
    }
  }
}

TEST(PipelineErrors, AStepThatCannotBeginSaysBeforeWhichAction) {
  std::string of_step, of_eval;
  const auto on_rank = [&](const Group& group) {
    const PipelineOptions options{.group = group, .microbatches = 2, .loss = loss_fn};
    Pipeline pipe(layer_of(group), options), other(layer_of(group), options);
    if (group->getRank() == 1) return;
    const staged::Batch batch = staged::batch_of(4, 2, 0);
    // From here on the group is unusable.
    EXPECT_THROW(recv(torch::zeros({1}), group, {.peer = 1}), c10::DistBackendError);
    of_step = error_text<c10::DistBackendError>([&] { pipe.step(batch.input, batch.target); });
    of_eval = error_text<c10::DistBackendError>([&] { other.eval(batch.input); });
  };
  run_ranks(2, on_rank, {.timeout = std::chrono::seconds(2)});
  EXPECT_THAT(of_step, HasSubstr("(before F s0 m0 on rank 0 of the pipeline)"));
  EXPECT_THAT(of_eval, HasSubstr("F s0 m0 on rank 0 of the pipeline)"));
}

// The last stage has no gradients to send then.
TEST(PipelineErrors, AFailureInEvalIsToldInTheNextCall) {
  std::vector<std::string> texts(2);
  std::latch all_know(2);
  run_ranks(2, [&](const Group& group) {
    const size_t rank = size_t(group->getRank());
    torch::nn::Linear fails(7, 7);
    Pipeline pipe(rank == 0 ? PipelineStage(layer_of(group)) : PipelineStage(fails),
                  {.group = group, .microbatches = 4, .loss = loss_fn});
    const staged::Batch batch = staged::batch_of(4, 40'000, 0);
    if (rank == 0) EXPECT_TRUE(pipe.eval(batch.input).empty());
    texts[rank] = error_text<c10::Error>([&] {
      if (rank == 1) pipe.eval();
      pipe.step(batch.input, batch.target);
    });
    all_know.arrive_and_wait();
  });
  EXPECT_THAT(texts, Each(HasSubstr("mat1 and mat2 shapes cannot be multiplied")));
  EXPECT_THAT(texts[0], HasSubstr("[Pipeline] rank 1 failed at F s1 m0: "));
}

TEST(PipelineErrors, OutputsAndTracesAreKeptWhereAskedFor) {
  run_ranks(1, [](const Group& group) {
    Pipeline pipe(layer_of(group), {.group = group, .microbatches = 1, .loss = loss_fn});
    EXPECT_THAT(
        error_text<c10::ValueError>([&] { pipe.outputs(); }),
        HasSubstr("[Pipeline] outputs of steps are not kept\n  fix: pass .keep_outputs = true, or call eval()"));
    EXPECT_THAT(
        error_text<c10::ValueError>([&] { pipe.trace(); }),
        HasSubstr("[Pipeline::trace] no step has been recorded\n  fix: pass .trace = true, and call step() before "
                  "trace()"));
  });
}

// What a stage between others gives.
PipelineStage stage_giving(const std::function<at::Tensor(const at::Tensor&)>& make) {
  return torch::nn::Sequential(torch::nn::Linear(staged::kWidth, staged::kWidth), torch::nn::Functional(make));
}

std::vector<std::string> texts_of_giving(const std::function<at::Tensor(const at::Tensor&)>& make) {
  return texts_of_all<c10::NotImplementedError>(2, [&](const Group& group) {
    Pipeline pipe(stage_giving(make), {.group = group, .microbatches = 1, .loss = loss_fn});
    pipe.eval(staged::batch_of(4, 2, 0).input);
  });
}

TEST(PipelineErrors, NineDimsAndSparseTensorsDoNotTravel) {
  EXPECT_THAT(texts_of_giving([](const at::Tensor& x) {
                return x.view({1, 1, 1, 1, 1, 1, 4, 2, staged::kWidth});
              }),
              Each(HasSubstr("[Pipeline] f32[1,1,1,1,1,1,4,2,6] between stages has more than 8 dims\n  fix: flatten "
                             "some of them")));
  EXPECT_THAT(texts_of_giving([](const at::Tensor& x) { return x.to_sparse(); }),
              Each(HasSubstr("[Pipeline] f32[4,2,6] between stages is not dense\n  fix: call to_dense() at the end of "
                             "the stage")));
}

// Its layout is text in a message of a fixed length.
TEST(PipelineErrors, MeshesOfManyAxesDoNotTravel) {
  const auto texts = texts_of_all<c10::NotImplementedError>(2, [](const Group& group) {
    Sizes shape(40, 1);
    std::vector<std::string> names;
    for (size_t i = 0; i < shape.size(); ++i) names.push_back("a" + std::to_string(i));
    shape[0] = 2;
    const DeviceMesh mesh = init_device_mesh("cpu", shape, names, {.group = group});
    const DeviceMesh within = mesh.slice(std::vector<std::string>(names.begin() + 1, names.end()));
    const auto place = [&](const at::Tensor& x) -> at::Tensor {
      return distribute_tensor(x, within, Placements(names.size() - 1, Replicate()));
    };
    Pipeline pipe(stage_giving(place), {.group = mesh.get_group("a0"), .microbatches = 1, .loss = loss_fn});
    pipe.eval(staged::batch_of(4, 2, 0).input);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("between stages lies as \"R R R R "),
                                HasSubstr("\", which is too long a text\n  fix: use a mesh with fewer axes"))));
}

// Ranks 0 and 3, 1 and 2: of five columns one of each has three.
TEST(PipelineErrors, NeighboursHaveEqualCoordinates) {
  const auto texts = texts_of_all<c10::ValueError>(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, {.group = group});
    torch::nn::Sequential stage(torch::nn::Linear(6, 5));
    parallelize_module(*stage, mesh["tp"], {{"0", ColwiseParallel()}});
    const Group crossed = split_group(group, {{0, 3}, {1, 2}});
    Pipeline pipe(stage, {.group = crossed, .microbatches = 1, .loss = loss_fn});
    pipe.eval(staged::batch_of(4, 2, 0).input);
  });
  EXPECT_THAT(texts, ::testing::Contains(AllOf(
                         HasSubstr("made is f32[4,2,5] S2 on 2 with 24 elements on the sender, and this rank's part "
                                   "would be [4,2,2]\n  fix: let neighbours in the pipeline have equal coordinates on "
                                   "their meshes"))));
}

struct GivesNothingImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", torch::ones({1}));
  at::Tensor forward(const at::Tensor&) { return {}; }
};
TORCH_MODULE(GivesNothing);

TEST(PipelineErrors, AStageGivesATensor) {
  EXPECT_THAT(
      texts_of_all<c10::ValueError>(2,
                                    [](const Group& group) {
                                      const PipelineStage stage = group->getRank() == 0 ? PipelineStage(layer_of(group))
                                                                                        : PipelineStage(GivesNothing());
                                      Pipeline pipe(stage, {.group = group, .microbatches = 1, .loss = loss_fn});
                                      const auto batch = staged::batch_of(4, 2, 0);
                                      pipe.step(batch.input, batch.target);
                                    }),
      Each(HasSubstr("GivesNothingImpl) gives no tensor\n  fix: return one from forward")));
}

// As a rank does whose step is a replay.
TEST(PipelineErrors, DataInPlaceOfAMessageIsRefused) {
  constexpr int kFirstTag = 1 << 20;
  for (const char* backend : {"threads", "gloo"}) {
    for (const int64_t bytes : {256, 257}) {
      run_ranks(
          2,
          [&](const Group& group) {
            Pipeline pipe(layer_of(group), {.group = group, .microbatches = 1, .loss = loss_fn});
            if (group->getRank() == 0) {
              send(torch::zeros({bytes}, at::kByte), group, {.peer = 1, .tag = kFirstTag});
              return;
            }
            const std::string text = error_text<c10::Error>([&] { pipe.step({}, staged::batch_of(1, 1, 0).target); });
            if (bytes == 257) {
              EXPECT_THAT(text, HasSubstr("[Pipeline] what came from rank 0 of the pipeline's group is no message of a "
                                          "step\n  fix: capture the step on all ranks or on none, "));
            } else {
              EXPECT_NE(text, "") << backend;
            }
          },
          {.backend = backend, .timeout = std::chrono::seconds(5)});
    }
  }
}

// It would wait for what was never asked for.
TEST(PipelineErrors, APeerThatRepeatsAMicroBatchIsNamed) {
  constexpr int kTag = 7;
  run_ranks(2, [](const Group& group) {
    if (group->getRank() == 0) {
      const detail::MessageHeader first;
      at::Tensor bytes = torch::zeros({detail::MessageHeader::kSentBytes}, at::kByte);
      std::memcpy(bytes.mutable_data_ptr(), &first, sizeof first);
      for (int i = 0; i < 2; ++i) send(bytes, group, {.peer = 1, .tag = kTag});
      return;
    }
    detail::Inbox inbox(group, 0, kTag);
    inbox.expect(2);
    EXPECT_EQ(inbox.take(0).header.microbatch, 0);
    EXPECT_THAT(error_text<c10::DistBackendError>([&] { inbox.take(1); }),
                HasSubstr("[Pipeline] rank 0 of the pipeline's group has sent all its messages of this step, and none "
                          "of micro-batch 1\n  fix: run the same version of serried on every rank, and let nobody "
                          "else send over the pipeline's group"));
  });
}

// What an error says of a message where no action is known: in a replay.
TEST(PipelineErrors, TagsTellWhatIsSentUnderThem) {
  EXPECT_EQ(detail::tag_text(7), "tag 7");
  EXPECT_EQ(detail::tag_text((1 << 20) - 1), "tag 1048575");
  EXPECT_EQ(detail::tag_text((1 << 20) + 2), "tag 1048578 (of a pipeline: the output of stage 1)");
  EXPECT_EQ(detail::tag_text((1 << 20) + 5), "tag 1048581 (of a pipeline: the gradient of stage 2)");
  EXPECT_EQ(detail::tag_text(1 << 21), "tag 2097152 (of attention: keys)");
  EXPECT_EQ(detail::tag_text((1 << 21) + 1), "tag 2097153 (of attention: gradients)");
  EXPECT_EQ(detail::tag_text((1 << 21) + 2), "tag 2097154");
}

// A hook may put a plain tensor in place of a DTensor's gradient.
TEST(PipelineErrors, GradientsLieAsWhatTheyAreOf) {
  const auto texts = texts_of_all<c10::ValueError>(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 1}, {"pp", "tp"}, {.group = group});
    const torch::nn::Functional unwraps([&](at::Tensor x) {
      if (group->getRank() == 1 && x.requires_grad()) {
        x.register_hook([](const at::Tensor& g) { return DTensor(g).full_tensor(); });
      }
      return x;
    });
    torch::nn::Sequential stage(unwraps, torch::nn::Linear(6, 6));
    parallelize_module(*stage, mesh["tp"], {{"1", ColwiseParallel()}});
    Pipeline pipe(stage, {.group = mesh.get_group("pp"), .microbatches = 2, .loss = loss_fn});
    const auto batch = staged::batch_of(4, 2, 0);
    const ImplicitReplication targets_are_whole;
    pipe.step(batch.input, batch.target);
  });
  EXPECT_THAT(texts[0],
              HasSubstr("[Pipeline] stage 1 gives f32[2,2,6] as the gradient of what stage 0 gave, f32[2,2,6] "
                        "S2 on mesh tp=1\n  fix: let each stage take the tensor as the stage before gives "
                        "it"));
}

TEST(PipelineErrors, TargetsHaveTheRowsOfTheInput) {
  EXPECT_THAT(step_texts({.target = staged::batch_of(3, 2, 0).target}),
              Each(HasSubstr("[Pipeline::step] the target has 3 rows, and the input 4, to be cut into 2 micro-batches "
                             "each\n  fix: pass one row of the target for each row of the input")));
  EXPECT_THAT(step_texts({.input = staged::batch_of(5, 2, 0).input, .target = staged::batch_of(10, 2, 0).target}),
              Each(HasSubstr("[Pipeline::step] the target has 10 rows, and the input 5,")));
  EXPECT_THAT(step_texts({.target = torch::ones({})}),
              Each(HasSubstr("[Pipeline::step] the target f32[] has no rows to be cut into micro-batches")));
}

}  // namespace
}  // namespace serried::testing
