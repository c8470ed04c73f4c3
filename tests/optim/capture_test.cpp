// A recorded step, repeated without calling step(): numbers, counts, rates, and what it relies on.
#include <gmock/gmock.h>

#include <sstream>

#include "serried/graph/capture.h"
#include "tests/optim/tape.h"
#include "tests/optim/twins.h"

namespace serried {
namespace {

using ::testing::ElementsAre;
using testing::expect_near;
using testing::give_gradients;
using testing::gradient;
using ::testing::IsEmpty;
using testing::make_parameters;
using ::testing::MatchesRegex;
using testing::Tape;
using testing::Tensors;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

// Into the same memory, as a captured backward does.
void fill_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& grad = parameters[i].mutable_grad();
    if (!grad.defined()) grad = at::empty_like(parameters[i]).detach();
    grad.copy_(gradient(parameters[i], step, i));
  }
}

// Records the very first step, the worst case: state comes to life in it.
template <class Ours, class Stock, class Options>
void compare_replayed(const Options& options) {
  const Tensors actual = make_parameters(at::kDouble);
  const Tensors expected = make_parameters(at::kDouble);
  Ours ours(actual, options);
  Stock stock(expected, options);
  torch::optim::StepLR our_schedule(ours, 5, 0.7);
  torch::optim::StepLR stock_schedule(stock, 5, 0.7);
  Tape tape;
  for (int step = 0; step < 50; ++step) {
    fill_gradients(actual, step);
    give_gradients(expected, step);
    if (step == 0) {
      tape.record([&] { ours.step(); });
    } else {
      EXPECT_THAT(tape.changed(), IsEmpty()) << "step " << step;
      tape.replay();
    }
    stock.step();
    our_schedule.step();
    stock_schedule.step();
  }
  expect_near(actual, expected, 1e-12, "replayed");
}

TEST(CapturedOptim, ReplaysGiveTheNumbersOfSteps) {
  compare_replayed<AdamW, torch::optim::AdamW>(AdamWOptions(0.01));
  compare_replayed<Adam, torch::optim::Adam>(AdamOptions(0.01).amsgrad(true).weight_decay(0.1));
  compare_replayed<SGD, torch::optim::SGD>(SGDOptions(0.01));
  compare_replayed<SGD, torch::optim::SGD>(SGDOptions(0.01).momentum(0.9).nesterov(true));
  compare_replayed<SGD, torch::optim::SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.4).weight_decay(0.1));
}

TEST(CapturedOptim, AStepIsOneOpAndOneToCount) {
  const Tensors parameters = make_parameters(at::kFloat);
  fill_gradients(parameters, 0);
  Tape adamw, sgd;
  AdamW first(parameters, AdamWOptions(0.01));
  adamw.record([&] { first.step(); });
  EXPECT_THAT(adamw.op_names(), ElementsAre("aten::add_.Scalar", "aten::_fused_adamw_.tensor_lr"));
  SGD second(parameters, SGDOptions(0.01).momentum(0.9));
  sgd.record([&] { second.step(); });
  EXPECT_THAT(sgd.op_names(), ElementsAre("aten::_fused_sgd_.tensor_lr"));
}

struct Trained {
  Tensors parameters = make_parameters(at::kDouble);
  AdamW optimizer{parameters, AdamWOptions(0.01)};
  Tape tape;

  // The last parameter takes no part.
  Trained() {
    fill_gradients(parameters, 0);
    parameters.back().mutable_grad().reset();
    optimizer.step();
    tape.record([&] { optimizer.step(); });
  }
  AdamWOptions& options() { return static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()); }
  torch::optim::AdamWParamState& state(size_t i) {
    return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameters[i].unsafeGetTensorImpl()));
  }
};

TEST(CapturedOptim, ReplaysCountOnTheHostToo) {
  Trained trained;
  trained.tape.replay();
  EXPECT_EQ(trained.state(0).step(), 3);
  trained.optimizer.step();
  trained.tape.replay();
  EXPECT_EQ(trained.state(0).step(), 5);
  EXPECT_THAT(trained.tape.changed(), IsEmpty());
}

TEST(CapturedOptim, OptionsThatAreConstantsOfTheGraphAreWitnessed) {
  Trained trained;
  trained.options().lr(0.5);
  EXPECT_THAT(trained.tape.changed(), IsEmpty()) << "the rate is read from a tensor";
  trained.options().weight_decay(0.5);
  EXPECT_THAT(trained.tape.changed(), ElementsAre("options of AdamW"));
  trained.options().weight_decay(0.01).betas({0.9, 0.99});
  EXPECT_THAT(trained.tape.changed(), ElementsAre("options of AdamW"));
  trained.options().betas({0.9, 0.999}).amsgrad(true);
  EXPECT_THAT(trained.tape.changed(), ElementsAre("options of AdamW"));
}

TEST(CapturedOptim, ReasonsForANewRecordingCanBeRead) {
  const Tensors parameters = make_parameters(at::kFloat);
  fill_gradients({parameters[0]}, 0);
  SGD optimizer(parameters, SGDOptions(0.1).momentum(0.9));
  auto step = capture([&](const at::Tensor&) { optimizer.step(); });
  for (int i = 0; i < 4; ++i) step(at::ones({1}));
  EXPECT_EQ(step.replays(), 1);
  static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.8);
  step(at::ones({1}));
  EXPECT_THAT(step.last_recapture_reason(),
              MatchesRegex("options of SGD was fingerprint [0-9a-f]+ and is fingerprint [0-9a-f]+"));
  step(at::ones({1}));
  fill_gradients(parameters, 0);
  step(at::ones({1}));
  EXPECT_EQ(step.last_recapture_reason(),
            "parameters without gradients of SGD was all and is all but " + std::to_string(parameters.size() - 1));
}

TEST(CapturedOptim, SgdOptionsAreWitnessed) {
  const Tensors parameters = make_parameters(at::kFloat);
  fill_gradients(parameters, 0);
  SGD optimizer(parameters, SGDOptions(0.1).momentum(0.9));
  Tape tape;
  tape.record([&] { optimizer.step(); });
  auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
  options.momentum(0.8);
  EXPECT_THAT(tape.changed(), ElementsAre("options of SGD"));
  options.momentum(0.9);
  optimizer.state().clear();
  EXPECT_THAT(tape.changed(), ElementsAre("parameters and state of SGD"));
}

TEST(CapturedOptim, AGradientThatWasNotThereIsWitnessed) {
  Trained trained;
  trained.parameters.back().mutable_grad() = at::ones_like(trained.parameters.back()).detach();
  EXPECT_THAT(trained.tape.changed(), ElementsAre("parameters without gradients of AdamW"));
}

TEST(CapturedOptim, AnotherGroupOrParameterIsWitnessed) {
  Trained trained;
  trained.optimizer.add_param_group(torch::optim::OptimizerParamGroup(Tensors{}));
  EXPECT_THAT(trained.tape.changed(), ElementsAre("options of AdamW", "parameters and state of AdamW"));
}

TEST(CapturedOptim, ALoadedStateIsWitnessed) {
  Trained trained;
  std::stringstream file;
  torch::save(trained.optimizer, file);
  torch::load(trained.optimizer, file);
  EXPECT_THAT(trained.tape.changed(), ElementsAre("parameters and state of AdamW"));
}

TEST(CapturedOptim, AStepCountSetByHandIsWitnessedAndUsed) {
  Trained trained;
  trained.state(0).step(100);
  EXPECT_THAT(trained.tape.changed(), ElementsAre("parameters and state of AdamW"));
  trained.optimizer.step();
  EXPECT_EQ(trained.state(0).step(), 101);
  EXPECT_EQ(trained.state(1).step(), 3);
}

TEST(CapturedOptim, ParametersThatPartFromTheOthersAreWitnessed) {
  Trained trained;
  const at::Tensor grad = trained.parameters[0].grad();
  trained.parameters[0].mutable_grad().reset();
  trained.optimizer.step();
  trained.parameters[0].mutable_grad() = grad;
  EXPECT_THAT(trained.tape.changed(), ElementsAre("parameters and state of AdamW"));
}

// A peer may die in the middle of a replay: the counts stay those of whole steps.
TEST(CapturedOptim, AReplayThatFailsIsNoStep) {
  Trained trained;
  const Tensors expected = make_parameters(at::kDouble);
  fill_gradients(expected, 0);
  expected.back().mutable_grad().reset();
  torch::optim::AdamW stock(expected, AdamWOptions(0.01));
  for (int step = 0; step < 4; ++step) stock.step();
  trained.tape.replay_first(1);
  trained.tape.replay();
  trained.tape.replay_first(1);
  trained.optimizer.step();
  EXPECT_EQ(trained.state(0).step(), 4);
  expect_near(trained.parameters, expected, 1e-12, "four steps");
}

TEST(CapturedOptim, AGraphMayOutliveItsOptimizer) {
  auto trained = std::make_unique<Trained>();
  Tape tape = std::move(trained->tape);
  trained = nullptr;
  EXPECT_THAT(tape.changed(), ElementsAre("options of AdamW", "parameters and state of AdamW"));
  tape.replay();
}

}  // namespace
}  // namespace serried
