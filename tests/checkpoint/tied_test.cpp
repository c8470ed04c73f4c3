// Weights that are one tensor under several names, here and not there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

// Parameters by name; a tensor that stands there twice is tied.
struct Named : torch::nn::Module {
  explicit Named(const std::vector<std::pair<std::string, at::Tensor>>& all) {
    std::map<const c10::TensorImpl*, at::Tensor> made;
    for (const auto& [name, value] : all) {
      at::Tensor& one = made[value.unsafeGetTensorImpl()];
      if (!one.defined()) one = value.clone();
      one = register_parameter(name, one);
    }
  }
  at::Tensor operator[](const std::string& name) const { return named_parameters()[name].detach(); }
};

at::Tensor filled(double value) {
  return torch::full({2, 2}, value);
}

TEST(TiedWeights, OfAStageAreTheItemOfAnother) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const at::Tensor shared = filled(3);
    const Named stage(world->getRank() == 0
                          ? std::vector<std::pair<std::string, at::Tensor>>{{"emb", shared}, {"head", shared}}
                          : std::vector<std::pair<std::string, at::Tensor>>{{"head", shared}, {"last", filled(4)}});
    checkpoint::save(folder / "c", {{"model", state_of(stage)}});
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : stage.parameters()) p.zero_();
    checkpoint::load(folder / "c", {{"model", state_of(stage)}});
    expect_equal(stage["head"], filled(3));
    if (world->getRank() == 1) expect_equal(stage["last"], filled(4));
  });
  const Named apart({{"emb", filled(0)}, {"head", filled(0)}, {"last", filled(0)}});
  checkpoint::load(folder / "c", {{"model", state_of(apart)}});
  expect_equal(apart["emb"], filled(3));
  expect_equal(apart["head"], filled(3));
  const at::Tensor one = filled(0);
  const Named tied({{"emb", one}, {"head", one}, {"last", filled(0)}});
  checkpoint::load(folder / "c", {{"model", state_of(tied)}});
  expect_equal(tied["head"], filled(3));
}

TEST(TiedWeights, OfStagesThatHaveDriftedAreRefused) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const at::Tensor shared = filled(3 + world->getRank());
    const Named stage(world->getRank() == 0
                          ? std::vector<std::pair<std::string, at::Tensor>>{{"emb", shared}, {"head", shared}}
                          : std::vector<std::pair<std::string, at::Tensor>>{{"head", shared}, {"last", filled(4)}});
    const std::string text = error_text<c10::ValueError>([&] {
      checkpoint::save(folder / "c", {{"model", state_of(stage)}});
    });
    EXPECT_EQ(text.find("[checkpoint::save] \"model.head\", f32[2,2], has other values on rank 1 than on rank 0\n"), 0u)
        << text;
  });
}

// In the order of registration the first name is the tensor's, and another on each rank.
TEST(TiedWeights, MayComeInAnotherOrderOnEachRank) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const at::Tensor shared = filled(3);
    const Named stage(world->getRank() == 0
                          ? std::vector<std::pair<std::string, at::Tensor>>{{"emb", shared}, {"head", shared}}
                          : std::vector<std::pair<std::string, at::Tensor>>{{"head", shared}, {"emb", shared}});
    checkpoint::save(folder / "c", {{"model", state_of(stage)}});
    checkpoint::load(folder / "c", {{"model", state_of(stage)}});
  });
  const Named apart({{"emb", filled(0)}, {"head", filled(0)}});
  checkpoint::load(folder / "c", {{"model", state_of(apart)}});
  expect_equal(apart["emb"], filled(3));
  expect_equal(apart["head"], filled(3));
}

TEST(TiedWeights, TakeValuesThatWereSavedApartOnlyWhereTheyAreTheSame) {
  const Folder folder;
  const at::Tensor shared = filled(0);
  const Named same({{"a", filled(1)}, {"b", filled(1)}}), differ({{"a", filled(1)}, {"b", filled(2)}});
  const Named tied({{"a", shared}, {"b", shared}});
  const std::string values =
      "\"b\" and \"a\" are one tensor here, and have different values there\n  fix: load into a model that does not "
      "tie "
      "them, or take one of them away: {.strict = false, .rename = {{\"^b$\", \"not_used\"}}}";
  checkpoint::save(folder / "same", {{"model", state_of(same)}});
  checkpoint::save(folder / "differ", {{"model", state_of(differ)}});
  save_safetensors(folder / "same.safetensors", same);
  save_safetensors(folder / "differ.safetensors", differ);
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::load(folder / "differ", {{"model", state_of(tied)}});
            }),
            "[checkpoint::load] of \"model\" " + values);
  EXPECT_EQ(error_text<c10::ValueError>([&] { load_safetensors(folder / "differ.safetensors", tied); }),
            c10::str("[load_safetensors] of ", folder / "differ.safetensors", " ", values));
  checkpoint::StateDict state = checkpoint::get_state({{"model", state_of(differ)}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"model", state_of(tied)}}, state);
            }),
            "[checkpoint::set_state] of \"model\" " + values);
  expect_equal(tied["a"], filled(0));
  checkpoint::load(folder / "same", {{"model", state_of(tied)}});
  expect_equal(tied["a"], filled(1));
  load_safetensors(folder / "same.safetensors", tied);
  checkpoint::set_state({{"model", state_of(tied)}}, checkpoint::get_state({{"model", state_of(same)}}));
  checkpoint::set_state({{"model", state_of(tied)}}, checkpoint::get_state({{"model", state_of(tied)}}));
  checkpoint::load(folder / "differ", {{"model", state_of(tied)}}, {.strict = false, .rename = {{"^a$", "not_used"}}});
  expect_equal(tied["b"], filled(2));
}

torch::optim::SGD momentum_of(const torch::nn::Module& net) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : net.parameters()) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(p); };
    if (std::none_of(parameters.begin(), parameters.end(), is_same)) parameters.push_back(p);
  }
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.5).momentum(0.9));
}

at::Tensor momentum(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
  return static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
}

void step(torch::optim::SGD& optimizer, const torch::nn::Module& net, const std::map<std::string, double>& gradients) {
  for (const auto& item : net.named_parameters()) {
    const auto found = gradients.find(item.key());
    if (found != gradients.end()) item.value().mutable_grad() = torch::full({2, 2}, found->second);
  }
  optimizer.step();
}

TEST(TiedWeights, HaveTheirOptimizerStateUnderEachName) {
  const Folder folder;
  const at::Tensor shared = filled(1);
  const Named first({{"emb", shared}, {"head", shared}}), turned({{"head", shared}, {"emb", shared}});
  torch::optim::SGD saved = momentum_of(first), loaded = momentum_of(turned);
  step(saved, first, {{"emb", 7}});
  checkpoint::save(folder / "c", {{"model", state_of(first)}, {"optim", state_of(saved)}});
  checkpoint::load(folder / "c", {{"model", state_of(turned)}, {"optim", state_of(loaded)}});
  expect_equal(momentum(loaded, turned.parameters()[0]), filled(7));
}

TEST(TiedWeights, TakeStateThatWasSavedApartOnlyWhereItIsTheSame) {
  const Folder folder;
  const at::Tensor shared = filled(1);
  const Named apart({{"a", filled(1)}, {"b", filled(1)}}), tied({{"a", shared}, {"b", shared}});
  const auto load = [&](torch::optim::Optimizer& optimizer) {
    checkpoint::load(folder / "c", {{"model", state_of(tied)}, {"optim", state_of(optimizer)}});
  };
  for (const double other : {7.0, 8.0}) {
    torch::optim::SGD saved = momentum_of(apart), loaded = momentum_of(tied);
    step(saved, apart, {{"a", 7}, {"b", other}});
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : apart.parameters()) p.fill_(1);
    checkpoint::save(folder / "c", {{"model", state_of(apart)}, {"optim", state_of(saved)}});
    if (other == 7.0) {
      load(loaded);
      expect_equal(momentum(loaded, tied.parameters()[0]), filled(7));
    } else {
      EXPECT_EQ(error_text<c10::ValueError>([&] { load(loaded); })
                    .find("[checkpoint::load] of \"optim\" \"b.momentum_buffer\" and \"a.momentum_buffer\" are one "
                          "tensor here, and have different values there\n"),
                0u);
    }
  }
}

// Takes two steps, so that each state has two numbers.
void train_twice(torch::optim::Optimizer& optimizer, const torch::nn::Module& net) {
  for (const double gradient : {1.0, 3.0}) {
    for (const at::Tensor& p : net.parameters()) p.mutable_grad() = torch::full({2, 2}, gradient);
    optimizer.step();
  }
}

at::Tensor running_average(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
  return static_cast<torch::optim::AdamWParamState&>(*state).exp_avg();
}

torch::optim::AdamW adamw_of(const torch::nn::Module& net) {
  return torch::optim::AdamW(momentum_of(net).param_groups()[0].params(), torch::optim::AdamWOptions(0.1));
}

TEST(TiedWeights, OfOneProcessGoWithTheirOptimizerStateIntoStages) {
  const Folder folder;
  const at::Tensor shared = filled(1);
  const Named whole({{"emb", shared}, {"head", shared}});
  torch::optim::AdamW optimizer = adamw_of(whole);
  train_twice(optimizer, whole);
  const at::Tensor expected = running_average(optimizer, whole.parameters()[0]).clone();
  checkpoint::save(folder / "c", {{"model", state_of(whole)}, {"optim", state_of(optimizer)}});
  const checkpoint::StateDict state =
      checkpoint::get_state({{"model", state_of(whole)}, {"optim", state_of(optimizer)}});
  const auto check = [&](const Named& net, const std::function<void(const checkpoint::Contents&)>& load) {
    torch::optim::AdamW mine = adamw_of(net);
    load({{"model", state_of(net)}, {"optim", state_of(mine)}});
    for (const at::Tensor& p : net.parameters()) expect_equal(running_average(mine, p), expected);
  };
  run_ranks(2, [&](const Group& world) {
    const at::Tensor one = filled(0);
    const Named stage(world->getRank() == 0
                          ? std::vector<std::pair<std::string, at::Tensor>>{{"emb", one}, {"head", one}}
                          : std::vector<std::pair<std::string, at::Tensor>>{{"head", one}});
    check(stage, [&](const checkpoint::Contents& contents) { checkpoint::load(folder / "c", contents); });
  });
  const Named apart({{"emb", filled(0)}, {"head", filled(0)}});
  check(apart, [&](const checkpoint::Contents& contents) { checkpoint::load(folder / "c", contents); });
  check(apart, [&](const checkpoint::Contents& contents) { checkpoint::set_state(contents, state); });
  const Named other({{"decoder", filled(0)}});
  check(other, [&](const checkpoint::Contents& contents) {
    checkpoint::load(folder / "c", contents, {.rename = {{"^head$", "decoder"}}});
  });
}

TEST(TiedWeights, OfZeroAndOfDTensorsGoWithTheirStateIntoAProcessThatHasOneName) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const at::Tensor shared = filled(1);
    const Named whole({{"emb", shared}, {"head", shared}, {"more", filled(2)}});
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(momentum_of(whole).param_groups()[0].params(),
                                                      torch::optim::AdamWOptions(0.1), {.process_group = world});
    train_twice(zero, whole);
    checkpoint::save(folder / "zero", {{"model", state_of(whole)}, {"optim", state_of(zero)}});
  });
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const at::Tensor cut = distribute_tensor(filled(1), mesh, {Shard(0)});
    torch::nn::Module sharded;
    const at::Tensor parameter = sharded.register_parameter("emb", cut);
    sharded.register_parameter("head", parameter);
    torch::optim::AdamW optimizer({parameter}, torch::optim::AdamWOptions(0.1));
    for (const double gradient : {1.0, 3.0}) {
      parameter.mutable_grad() = distribute_tensor(filled(gradient), mesh, {Shard(0)});
      optimizer.step();
    }
    checkpoint::save(folder / "dtensor", {{"model", state_of(sharded)}, {"optim", state_of(optimizer)}});
  });
  const Named expected({{"head", filled(1)}});
  torch::optim::AdamW same = adamw_of(expected);
  train_twice(same, expected);
  for (const char* name : {"zero", "dtensor"}) {
    const Named head({{"head", filled(0)}});
    torch::optim::AdamW optimizer = adamw_of(head);
    checkpoint::load(folder / name, {{"model", state_of(head)}, {"optim", state_of(optimizer)}}, {.strict = false});
    expect_close(head["head"], expected["head"]);
    expect_close(running_average(optimizer, head.parameters()[0]), running_average(same, expected.parameters()[0]));
  }
}

}  // namespace
}  // namespace serried::testing
