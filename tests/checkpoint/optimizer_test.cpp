// Optimizers, schedulers, samplers and generators: training goes on as if nothing had happened.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/random/random.h"
#include "tests/checkpoint/folder.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using sharded::Mlp;
using sharded::Net;
using sharded::NetPtr;
using sharded::values_of;

NetPtr make_mlp() {
  return sharded::make([] { return std::make_shared<Mlp>(); }, at::kDouble);
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct NamedOptimizer {
  std::string name;
  MakeOptimizer make;
};

template <class Optimizer, class Options>
NamedOptimizer optimizer_of(std::string name, Options options) {
  return {std::move(name), [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

std::vector<NamedOptimizer> all_optimizers() {
  namespace optim = torch::optim;
  return {optimizer_of<optim::SGD>("SGD", optim::SGDOptions(0.05).momentum(0.9).dampening(0.1)),
          optimizer_of<optim::SGD>("plain SGD", optim::SGDOptions(0.05)),
          optimizer_of<optim::Adam>("Adam", optim::AdamOptions(0.02).amsgrad(true)),
          optimizer_of<optim::AdamW>("AdamW", optim::AdamWOptions(0.02).betas({0.8, 0.95})),
          optimizer_of<optim::RMSprop>("RMSprop", optim::RMSpropOptions(0.01).momentum(0.5).centered(true)),
          optimizer_of<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.05).lr_decay(0.01)),
          optimizer_of<optim::LBFGS>("LBFGS", optim::LBFGSOptions(0.1).max_iter(3).history_size(4)),
          optimizer_of<serried::Adam>("serried::Adam", optim::AdamOptions(0.02).amsgrad(true)),
          optimizer_of<serried::AdamW>("serried::AdamW", optim::AdamWOptions(0.02)),
          optimizer_of<serried::SGD>("serried::SGD", optim::SGDOptions(0.05).momentum(0.9))};
}

void train(Net& net, torch::optim::Optimizer& optimizer, int64_t first, int64_t count) {
  for (int64_t step = first; step < first + count; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = net.loss(step);
      loss.backward();
      return loss;
    });
  }
}

void expect_all_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                      const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], what);
}

TEST(CheckpointOptimizer, TrainingGoesOnAsIfItHadNotStopped) {
  ASSERT_EQ(all_optimizers().size(), 10u);
  for (const NamedOptimizer& each : all_optimizers()) {
    SCOPED_TRACE(each.name);
    const Folder folder;
    const NetPtr whole = make_mlp();
    const auto optimizer = each.make(whole->parameters());
    train(*whole, *optimizer, 0, 3);
    checkpoint::save(folder / "c", {{"model", state_of(*whole)}, {"optim", state_of(*optimizer)}});
    train(*whole, *optimizer, 3, 10);
    // A new process: another start, other options, no state.
    const NetPtr again = sharded::make([] { return std::make_shared<Mlp>(); }, at::kDouble);
    for (at::Tensor& p : again->parameters()) p.data().fill_(0.5);
    const auto loaded = each.make(again->parameters());
    loaded->param_groups()[0].options().set_lr(123);
    checkpoint::load(folder / "c", {{"model", state_of(*again)}, {"optim", state_of(*loaded)}});
    train(*again, *loaded, 3, 10);
    expect_all_equal(values_of(*again), values_of(*whole), each.name);
  }
}

TEST(CheckpointOptimizer, AStateThatIsThereIsWrittenInPlace) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  train(*net, optimizer, 0, 2);
  checkpoint::save(folder / "c", {{"optim", state_of(optimizer)}});
  auto& state =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[net->parameters()[0].unsafeGetTensorImpl()]);
  const at::Tensor average = state.exp_avg(), before = average.clone();
  train(*net, optimizer, 2, 2);
  checkpoint::load(folder / "c", {{"optim", state_of(optimizer)}});
  const auto& after =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[net->parameters()[0].unsafeGetTensorImpl()]);
  EXPECT_TRUE(after.exp_avg().is_same(average));
  expect_equal(average, before);
  EXPECT_EQ(after.step(), 2);
}

TEST(CheckpointOptimizer, AParameterWithoutStateHasNoneAfterwards) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::optim::AdamW fresh(net->parameters(), torch::optim::AdamWOptions(0.02));
  checkpoint::save(folder / "c", {{"optim", state_of(fresh)}});
  train(*net, fresh, 0, 1);
  EXPECT_EQ(fresh.state().size(), 8u);
  checkpoint::load(folder / "c", {{"optim", state_of(fresh)}});
  EXPECT_EQ(fresh.state().size(), 0u);
}

TEST(CheckpointOptimizer, WithoutTheModuleParametersGoByTheirPlace) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::optim::AdamW named(net->parameters(), torch::optim::AdamWOptions(0.02)),
      other(net->parameters(), torch::optim::AdamWOptions(0.5));
  train(*net, named, 0, 2);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(named)}});
  checkpoint::load(folder / "c", {{"optim", state_of(other)}});
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.02);
  // A module whose parameters are not the optimizer's gives it no names.
  checkpoint::save(folder / "d", {{"model", state_of(*make_mlp())}, {"optim", state_of(named)}});
  torch::optim::AdamW third(net->parameters(), torch::optim::AdamWOptions(0.5));
  checkpoint::load(folder / "d", {{"model", state_of(*net)}, {"optim", state_of(third)}});
  EXPECT_EQ(third.state().size(), 8u);
}

TEST(CheckpointOptimizer, OtherParametersOrAnotherKindAreRefused) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::nn::Linear linear(3, 2);
  torch::optim::AdamW saved(net->parameters(), torch::optim::AdamWOptions(0.02));
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.02));
  torch::optim::AdamW small(linear->parameters(), torch::optim::AdamWOptions(0.02));
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(saved)}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "c", {{"optim", state_of(adam)}});
            }),
            "[checkpoint::load] an optimizer is AdamW in the checkpoint, and Adam here\n  fix: load into an optimizer "
            "of the same kind");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "c", {{"optim", state_of(small)}});
            }),
            "[checkpoint::load] \"optim\" has other names in the checkpoint: missing there: group0.param0, "
            "group0.param1; only there: "
            "first.bias, first.weight, head.bias, head.weight, second.bias, second.weight, third.bias, third.weight\n  "
            "fix: load "
            "into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
  torch::optim::AdamW groups({torch::optim::OptimizerParamGroup({net->parameters()[0]}),
                              torch::optim::OptimizerParamGroup({net->parameters()[1]})},
                             torch::optim::AdamWOptions(0.02));
  EXPECT_EQ(
      error_text<c10::ValueError>([&] {
        checkpoint::load(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(groups)}});
      }),
      "[checkpoint::load] parameters that were in one group of an optimizer are in two here: \"first.weight\" "
      "(group 0 there, group 0 here) and \"first.bias\" (group 0 there, group 1 here)\n  fix: make the groups that "
      "were saved, or pass {.strict = false}: each group gets the options that its parameters were saved with");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "c", {{"model", state_of(saved)}});
            }),
            "[checkpoint::load] it is no optimizer in the checkpoint\n  fix: give it the name that it was saved under");
}

TEST(CheckpointOptimizer, GroupsKeepTheirOptions) {
  const Folder folder;
  const NetPtr net = make_mlp();
  const auto make = [&](double lr, double decay) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    const auto parameters = net->parameters();
    groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 3),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr)));
    groups.emplace_back(
        std::vector<at::Tensor>(parameters.begin() + 3, parameters.end()),
        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(2 * lr).weight_decay(decay)));
    return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(lr));
  };
  const auto saved = make(0.1, 0.3), loaded = make(7, 8);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(*saved)}});
  checkpoint::load(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(*loaded)}});
  for (size_t g = 0; g < 2; ++g) {
    EXPECT_TRUE(static_cast<torch::optim::AdamWOptions&>(loaded->param_groups()[g].options()) ==
                static_cast<torch::optim::AdamWOptions&>(saved->param_groups()[g].options()));
  }
}

std::unique_ptr<torch::optim::SGD> sgd_of(const std::vector<std::pair<std::vector<at::Tensor>, double>>& groups) {
  std::vector<torch::optim::OptimizerParamGroup> made;
  for (const auto& [parameters, lr] : groups) {
    made.emplace_back(parameters,
                      std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(lr).momentum(0.9)));
  }
  return std::make_unique<torch::optim::SGD>(made, torch::optim::SGDOptions(1).momentum(0.9));
}

double lr_of(torch::optim::Optimizer& optimizer, size_t group) {
  return optimizer.param_groups().at(group).options().get_lr();
}

TEST(CheckpointOptimizer, OptionsGoByParameterAndNotByTheNumberOfTheGroup) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  const at::Tensor w = net->weight, b = net->bias;
  const auto contents = [&](torch::optim::Optimizer& optimizer) {
    return checkpoint::Contents{{"model", state_of(net)}, {"optim", state_of(optimizer)}};
  };
  const auto saved = sgd_of({{{w}, 0.1}, {{b}, 0.2}}), turned = sgd_of({{{b}, 7}, {{w}, 8}}),
             one = sgd_of({{{w, b}, 5}});
  checkpoint::save(folder / "two", contents(*saved));
  checkpoint::load(folder / "two", contents(*turned));
  EXPECT_EQ(lr_of(*turned, 0), 0.2);
  EXPECT_EQ(lr_of(*turned, 1), 0.1);
  for (const bool strict : {true, false}) {
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { checkpoint::load(folder / "two", contents(*one), {.strict = strict}); }),
        "[checkpoint::load] parameters of one group of an optimizer were saved with different options: \"weight\" "
        "(group 0 there, group 0 here) and \"bias\" (group 1 there, group 0 here)\n  fix: make the groups that "
        "were saved");
  }
  EXPECT_EQ(lr_of(*one, 0), 5);
  checkpoint::save(folder / "one", contents(*one));
  checkpoint::load(folder / "one", contents(*turned), {.strict = false});
  EXPECT_EQ(lr_of(*turned, 0), 5);
  EXPECT_EQ(lr_of(*turned, 1), 5);
}

TEST(CheckpointOptimizer, SizesOfParametersAreCompared) {
  const Folder folder;
  torch::nn::Linear net(3, 2), other(2, 3);
  const auto saved = sgd_of({{{net->weight, net->bias}, 0.1}}), turned = sgd_of({{{net->bias, net->weight}, 0.1}});
  checkpoint::save(folder / "c", {{"model", state_of(net)}, {"optim", state_of(*saved)}});
  EXPECT_EQ(
      error_text<c10::ValueError>([&] {
        checkpoint::load(folder / "c", {{"optim", state_of(*turned)}});
      }),
      "[checkpoint::load] the parameter \"weight\" of an optimizer has sizes [2,3] in the checkpoint, and [2] here "
      "for \"group0.param0\"\n  fix: load the module in the same call, {\"model\", state_of(*net)}, so that state "
      "goes by the names of parameters, or list parameters in the order in which they were saved");
  const auto larger = sgd_of({{{other->weight, other->bias}, 0.1}});
  checkpoint::save(folder / "e", {{"model", state_of(other)}, {"optim", state_of(*larger)}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "e", {{"model", state_of(net)}, {"optim", state_of(*saved)}});
            }).find("[checkpoint::load] \"model.weight\" has sizes [3,2] in the checkpoint, and [2,3] here"),
            0u);
}

TEST(CheckpointOptimizer, ATensorOfTheStateThatTheFileLacksIsNamed) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  net(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  checkpoint::StateDict state = checkpoint::get_state({{"model", state_of(net)}, {"optim", state_of(optimizer)}});
  ASSERT_EQ(state["optim"].tensors.erase("weight.exp_avg_sq"), 1u);
  EXPECT_EQ(
      error_text<c10::ValueError>([&] {
        checkpoint::set_state({{"model", state_of(net)}, {"optim", state_of(optimizer)}}, state);
      }),
      "[checkpoint::set_state] the checkpoint lacks the tensor \"weight.exp_avg_sq\", though the optimizer had it "
      "when it was saved\n  fix: use another checkpoint");
}

TEST(CheckpointOptimizer, StockStateLoadsIntoOursAndBack) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::optim::AdamW stock(net->parameters(), torch::optim::AdamWOptions(0.02));
  train(*net, stock, 0, 3);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(stock)}});
  serried::AdamW ours(net->parameters(), torch::optim::AdamWOptions(0.5));
  checkpoint::load(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(ours)}});
  checkpoint::save(folder / "d", {{"model", state_of(*net)}, {"optim", state_of(ours)}});
  EXPECT_EQ(content_of(folder / "c/optim-00001-of-00001.safetensors"),
            content_of(folder / "d/optim-00001-of-00001.safetensors"));
}

TEST(CheckpointOptimizer, SchedulersGoOn) {
  const Folder folder;
  const NetPtr net = make_mlp();
  torch::optim::SGD whole(net->parameters(), torch::optim::SGDOptions(1.0)),
      loaded(net->parameters(), torch::optim::SGDOptions(1.0));
  torch::optim::StepLR steps(whole, 3, 0.5), again(loaded, 3, 0.5);
  torch::optim::ReduceLROnPlateauScheduler plateau(whole), plateau_again(loaded);
  for (int i = 0; i < 4; ++i) steps.step();
  for (int i = 0; i < 8; ++i) plateau.step(1.0f);
  checkpoint::save(folder / "c",
                   {{"optim", state_of(whole)}, {"steps", state_of(steps)}, {"plateau", state_of(plateau)}});
  checkpoint::load(folder / "c",
                   {{"optim", state_of(loaded)}, {"steps", state_of(again)}, {"plateau", state_of(plateau_again)}});
  for (int i = 0; i < 10; ++i) {
    steps.step(), again.step();
    plateau.step(1.0f), plateau_again.step(1.0f);
    EXPECT_EQ(loaded.param_groups()[0].options().get_lr(), whole.param_groups()[0].options().get_lr()) << i;
  }
  EXPECT_LT(whole.param_groups()[0].options().get_lr(), 0.1);
}

TEST(CheckpointOptimizer, ASamplerGoesOnUnderAnotherNumberOfRanks) {
  const Folder folder;
  const auto sampler_of = [](int64_t ranks, int64_t rank) {
    return DistributedSampler(23, {.seed = 5, .num_replicas = ranks, .rank = rank});
  };
  std::vector<size_t> order;  // of an epoch of one rank
  DistributedSampler alone = sampler_of(1, 0);
  alone.set_epoch(2);
  alone.reset();
  order = *alone.next(23);
  run_ranks(4, [&](const Group& group) {
    DistributedSampler sampler = sampler_of(4, group->getRank());
    sampler.set_epoch(2);
    DistributedSampler copy = sampler;  // as a loader keeps one
    copy.reset();
    copy.next(2);
    checkpoint::save(folder / "c", {{"sampler", state_of(sampler)}});
  });
  run_ranks(3, [&](const Group& group) {
    DistributedSampler sampler = sampler_of(3, group->getRank());
    DistributedSampler copy = sampler;
    checkpoint::load(folder / "c", {{"sampler", state_of(sampler)}});
    EXPECT_EQ(sampler.epoch(), 2);
    for (DistributedSampler* each : {&sampler, &copy}) {
      each->reset();
      EXPECT_EQ(each->consumed(), 8u);
    }
    // Samples 8 to 22 are left: five rounds of three.
    const std::vector<size_t> mine = *copy.next(100);
    ASSERT_EQ(mine.size(), 5u);
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(mine[i], order[8 + 3 * i + size_t(group->getRank())]);
    EXPECT_EQ(sampler.consumed(), 23u);
    copy.reset();
    EXPECT_EQ(copy.next(100)->size(), 8u) << "the next epoch is a whole one";
  });
}

// As at the top of a loop over epochs.
TEST(CheckpointOptimizer, ASamplerThatHasNotBegunItsEpochBeginsIt) {
  const Folder folder;
  DistributedSampler sampler(10, {.num_replicas = 1, .rank = 0});
  sampler.reset();
  sampler.next(10);
  EXPECT_TRUE(sampler.is_at_end());
  sampler.set_epoch(1);
  EXPECT_FALSE(sampler.is_at_end());
  EXPECT_EQ(sampler.consumed(), 0u);
  checkpoint::save(folder / "c", {{"sampler", state_of(sampler)}});
  DistributedSampler other(10, {.num_replicas = 1, .rank = 0});
  checkpoint::load(folder / "c", {{"sampler", state_of(other)}});
  other.reset();
  sampler.reset();
  EXPECT_EQ(other.next(10), sampler.next(10));
}

TEST(CheckpointOptimizer, RandomGeneratorsGoOn) {
  const Folder folder;
  torch::manual_seed(3);
  torch::randn({5});
  checkpoint::save(folder / "c", {{"random", checkpoint::random_state()}});
  const at::Tensor expected = torch::randn({7});
  torch::manual_seed(99);
  checkpoint::load(folder / "c", {{"random", checkpoint::random_state()}});
  expect_equal(torch::randn({7}), expected);
}

TEST(CheckpointOptimizer, GeneratorsOfRanksThatDifferNeedAsManyRanks) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    rank_generator().set_current_seed(uint64_t(group->getRank()));
    checkpoint::save(folder / "c", {{"random", checkpoint::random_state()}});
    const at::Tensor expected = at::randn({3}, rank_generator());
    checkpoint::load(folder / "c", {{"random", checkpoint::random_state()}});
    expect_equal(at::randn({3}, rank_generator()), expected);
  });
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "c", {{"random", checkpoint::random_state()}});
            }),
            "[checkpoint::load] the random generators of 2 ranks differed when they were saved, and 1 rank loads\n  "
            "fix: load with as "
            "many ranks, or leave the random state out and seed anew");
}

TEST(CheckpointOptimizer, StateMadeBeforeTheParameterWasPlacedIsPlacedLikeIt) {
  run_ranks(2, [&](const Group& group) {
    const NetPtr net = make_mlp(), alone = make_mlp();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02)),
        stock(alone->parameters(), torch::optim::AdamWOptions(0.02));
    train(*net, optimizer, 0, 2);
    train(*alone, stock, 0, 4);
    optimizer.zero_grad();
    sharded::shard_all(*net);
    place_like_parameters(optimizer);
    train(*net, optimizer, 2, 2);
    const auto actual = values_of(*net), expected = values_of(*alone);
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-9);
  });
}

TEST(CheckpointOptimizer, RenamesHoldForStateToo) {
  const Folder folder;
  torch::nn::Linear saved(2, 2);
  torch::nn::Sequential wrapped(torch::nn::Linear(2, 2));
  torch::optim::SGD optimizer(saved->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  (3 * saved(torch::ones({1, 2})).sum()).backward();
  optimizer.step();
  checkpoint::save(folder / "c", {{"model", state_of(saved)}, {"optim", state_of(optimizer)}});
  torch::optim::SGD loaded(wrapped->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  checkpoint::load(folder / "c", {{"model", state_of(wrapped)}, {"optim", state_of(loaded)}},
                   {.rename = {{"^", "0."}}});
  const auto& state =
      static_cast<torch::optim::SGDParamState&>(*loaded.state()[wrapped->parameters()[0].unsafeGetTensorImpl()]);
  expect_equal(state.momentum_buffer(), torch::full({2, 2}, 3.0));
}

TEST(CheckpointOptimizer, CapturedStepsGoOnFromWhatWasLoaded) {
  const Folder folder;
  const NetPtr net = make_mlp(), plain = make_mlp();
  serried::AdamW captured_optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  serried::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02));
  const auto step_of = [](Mlp& mlp, torch::optim::Optimizer& each, const at::Tensor& x) {
    each.zero_grad();
    const at::Tensor loss = mlp.forward(x).square().mean();
    loss.backward();
    each.step();
    return loss;
  };
  auto& mlp = static_cast<Mlp&>(*net);
  auto step = capture([&](const at::Tensor& x) { return step_of(mlp, captured_optimizer, x); });
  const auto input = [](int i) { return models::values({6, 5}, i).to(at::kDouble); };
  const auto train_both = [&](int first, int count) {
    for (int i = first; i < first + count; ++i) {
      expect_equal(step(input(i)), step_of(static_cast<Mlp&>(*plain), optimizer, input(i)), std::to_string(i));
    }
  };
  train_both(0, 5);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(captured_optimizer)}});
  train_both(5, 5);
  checkpoint::load(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(captured_optimizer)}});
  checkpoint::load(folder / "c", {{"model", state_of(*plain)}, {"optim", state_of(optimizer)}});
  train_both(5, 8);
  EXPECT_GE(step.replays(), 8);
}

// State that was not there yet, other options, and state that is there again.
TEST(CheckpointOptimizer, CapturedStepsSeeOptionsAndStateThatALoadChanges) {
  const Folder folder;
  const NetPtr nets[2] = {make_mlp(), make_mlp()};
  std::vector<std::unique_ptr<serried::AdamW>> optimizers;
  for (const NetPtr& net : nets) {
    optimizers.push_back(std::make_unique<serried::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.02)));
  }
  const auto contents = [&](size_t i) {
    return checkpoint::Contents{{"model", state_of(*nets[i])}, {"optim", state_of(*optimizers[i])}};
  };
  const auto step_of = [&](size_t i, const at::Tensor& x) {
    optimizers[i]->zero_grad();
    const at::Tensor loss = static_cast<Mlp&>(*nets[i]).forward(x).square().mean();
    loss.backward();
    optimizers[i]->step();
    return loss;
  };
  auto step = capture([&](const at::Tensor& x) { return step_of(0, x); });
  const auto train_both = [&](const char* when) {
    for (int i = 0; i < 5; ++i) {
      const at::Tensor x = models::values({6, 5}, i).to(at::kDouble);
      expect_equal(step(x), step_of(1, x), c10::str(when, ", step ", i));
    }
  };
  checkpoint::save(folder / "begin", contents(1));
  train_both("at first");
  optimizers[1]->param_groups()[0].options().set_lr(0.3);
  checkpoint::save(folder / "later", contents(1));
  for (const char* name : {"begin", "later", "begin"}) {
    for (size_t i : {0, 1}) checkpoint::load(folder / name, contents(i));
    train_both(name);
  }
  EXPECT_GT(step.replays(), 0);
}

// Each layer has the other's name in the second module.
TEST(CheckpointOptimizer, ModulesMayShareParametersUnderCrossingNames) {
  const Folder folder;
  torch::nn::Linear first(2, 2), second(2, 2);
  torch::nn::Sequential model(first, second), back(second, first);
  torch::optim::SGD optimizer(
      {torch::optim::OptimizerParamGroup(first->parameters()), torch::optim::OptimizerParamGroup(second->parameters())},
      torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto lr = [&](size_t group) -> double { return optimizer.param_groups()[group].options().get_lr(); };
  optimizer.param_groups()[1].options().set_lr(0.2);
  (first(torch::ones({1, 2})).sum() + 2 * second(torch::ones({1, 2})).sum()).backward();
  optimizer.step();
  const checkpoint::Contents contents = {
      {"model", state_of(*model)}, {"back", state_of(*back)}, {"optim", state_of(optimizer)}};
  checkpoint::save(folder / "c", contents);
  for (const bool strict : {true, false}) {
    optimizer.state().clear();
    for (auto& group : optimizer.param_groups()) group.options().set_lr(9);
    checkpoint::load(folder / "c", contents, {.strict = strict});
    EXPECT_EQ(lr(0), 0.1);
    EXPECT_EQ(lr(1), 0.2);
    const auto& state =
        static_cast<torch::optim::SGDParamState&>(*optimizer.state()[second->weight.unsafeGetTensorImpl()]);
    expect_equal(state.momentum_buffer(), torch::full({2, 2}, 2.0));
  }
}

TEST(CheckpointOptimizer, TwoModulesMayHaveTheSameNames) {
  const Folder folder;
  torch::nn::Linear a(2, 2), b(2, 2);
  std::vector<at::Tensor> both = a->parameters();
  for (const at::Tensor& p : b->parameters()) both.push_back(p);
  torch::optim::SGD optimizer(both, torch::optim::SGDOptions(0.1).momentum(0.9));
  (a(torch::ones({1, 2})).sum() + 2 * b(torch::ones({1, 2})).sum()).backward();
  optimizer.step();
  checkpoint::save(folder / "c", {{"a", state_of(*a)}, {"b", state_of(*b)}, {"optim", state_of(optimizer)}});
  torch::optim::SGD loaded(both, torch::optim::SGDOptions(0.1).momentum(0.9));
  checkpoint::load(folder / "c", {{"a", state_of(*a)}, {"b", state_of(*b)}, {"optim", state_of(loaded)}});
  const auto& state = static_cast<torch::optim::SGDParamState&>(*loaded.state()[b->weight.unsafeGetTensorImpl()]);
  expect_equal(state.momentum_buffer(), torch::full({2, 2}, 2.0));
}

}  // namespace
}  // namespace serried::testing
