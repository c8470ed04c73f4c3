// Ranks that hold different parts of a model, as the stages of a pipeline: all is saved, under any split it is loaded.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/random/random.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int64_t kLayers = 4;

// Layers first to last of a model, under the names that they have in the whole; each has a gradient of its own.
struct StageImpl : torch::nn::Module {
  std::vector<torch::nn::Linear> layers;
  StageImpl(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      layers.push_back(seeded(uint64_t(i) + 1, [&] { return torch::nn::Linear(5, 4 + i); }));
      register_module("layer" + std::to_string(i), layers.back());
    }
  }
  void train(torch::optim::Optimizer& optimizer, int64_t first, int64_t count) {
    for (int64_t step = first; step < first + count; ++step) {
      optimizer.zero_grad();
      for (torch::nn::Linear& layer : layers) {
        layer->forward(torch::arange(10, at::kFloat).reshape({2, 5}) * 0.1 + double(step)).square().mean().backward();
      }
      optimizer.step();
    }
  }
};
TORCH_MODULE(Stage);

std::map<std::string, at::Tensor> named_values(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> values;
  for (const auto& item : module.named_parameters()) values[item.key()] = full(item.value().detach()).clone();
  return values;
}

// Ranks of a split: how many stages there are, and how many ranks have a copy of each.
struct Split {
  int64_t stages;
  int64_t copies;
  enum class Kind { plain, sharded, zero } kind = Kind::plain;
};

struct StageTraining {
  Stage stage{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  checkpoint::Contents contents() { return {{"model", state_of(stage)}, {"optim", state_of(*optimizer)}, {"step", 3}}; }
};

void on(const Split& split, const std::function<void(StageTraining&)>& fn) {
  run_ranks(int(split.stages * split.copies), [&](const Group& world) {
    const int64_t number = world->getRank() / split.copies, layers = kLayers / split.stages;
    const DeviceMesh mesh = init_device_mesh("cpu", {split.stages, split.copies}, {"pp", "dp"}, {.group = world});
    StageTraining training{Stage(number * layers, (number + 1) * layers), nullptr};
    if (split.kind == Split::Kind::sharded) fully_shard(*training.stage, {.mesh = mesh["dp"]});
    if (split.kind == Split::Kind::zero) {
      training.optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(
          training.stage->parameters(), AdamWOptions(0.05), ZeroOptions{.process_group = mesh.get_group("dp")});
    } else {
      training.optimizer = std::make_unique<AdamW>(training.stage->parameters(), AdamWOptions(0.05));
    }
    fn(training);
  });
}

TEST(CheckpointStages, AreSavedTogetherAndLoadedUnderAnySplit) {
  const SmallLimits limits({.file_bytes = 300, .block_bytes = 64, .short_run = 32});
  using Kind = Split::Kind;
  const std::vector<Split> splits = {{1, 1}, {2, 1}, {4, 1}, {2, 2}, {2, 2, Kind::sharded}, {1, 3}, {2, 2, Kind::zero}};
  Stage whole(0, kLayers);
  AdamW optimizer(whole->parameters(), AdamWOptions(0.05));
  whole->train(optimizer, 0, 3);
  const auto saved = named_values(*whole);
  whole->train(optimizer, 3, 10);
  const auto expected = named_values(*whole);
  for (const Split& split : splits) {
    const Folder folder;
    on(split, [&](StageTraining& training) {
      training.stage->train(*training.optimizer, 0, 3);
      checkpoint::save(folder / "c", training.contents());
    });
    for (const Split& other : splits) {
      on(other, [&](StageTraining& training) {
        training.stage->train(*training.optimizer, 50, 1);
        for (auto& group : training.optimizer->param_groups()) group.options().set_lr(9);
        checkpoint::load(folder / "c", {{"model", state_of(training.stage)}, {"optim", state_of(*training.optimizer)}});
        for (const auto& [name, value] : named_values(*training.stage)) expect_close(value, saved.at(name), name);
        training.stage->train(*training.optimizer, 3, 10);
        for (const auto& [name, value] : named_values(*training.stage)) expect_close(value, expected.at(name), name);
      });
    }
  }
}

TEST(CheckpointStages, MayBeEntriesOfTheirOwn) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const std::string name = "stage" + std::to_string(world->getRank());
    torch::nn::Linear net = seeded(uint64_t(world->getRank()), [] { return torch::nn::Linear(3, 2); });
    const at::Tensor before = net->weight.detach().clone();
    checkpoint::save(folder / "c", {{name, state_of(net)}, {"step", 4}});
    const at::NoGradGuard no_grad;
    net->weight.zero_();
    checkpoint::load(folder / "c", {{name, state_of(net)}});
    expect_equal(net->weight, before);
  });
  torch::nn::Linear second(3, 2);
  checkpoint::load(folder / "c", {{"stage1", state_of(second)}});
  expect_equal(second->bias.detach(), seeded(1, [] { return torch::nn::Linear(3, 2); })->bias.detach());
}

std::string save_error_on_all(int ranks, const std::function<checkpoint::Contents(const Group&)>& contents) {
  const Folder folder;
  std::string first;
  run_ranks(ranks, [&](const Group& world) {
    const checkpoint::Contents mine = contents(world);
    std::string text = error_text<c10::ValueError>([&] { checkpoint::save(folder / "c", mine); });
    text = text.substr(0, text.find('\n'));
    EXPECT_FALSE(text.empty());
    if (world->getRank() == 0) first = text;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{});
  return first;
}

TEST(CheckpointStages, OfOneNameAreRefused) {
  EXPECT_EQ(save_error_on_all(2,
                              [](const Group& world) {
                                static thread_local torch::nn::Linear net{nullptr};
                                net = seeded(uint64_t(world->getRank()), [] { return torch::nn::Linear(3, 2); });
                                return checkpoint::Contents{{"model", state_of(net)}};
                              }),
            "[checkpoint::save] \"model.weight\", f32[2,3], has other values on rank 1 than on rank 0");
  // Names overlap, and what is common has other sizes.
  EXPECT_EQ(save_error_on_all(2,
                              [](const Group& world) {
                                static thread_local torch::nn::Linear net{nullptr};
                                net = torch::nn::Linear(3, 2 + world->getRank());
                                return checkpoint::Contents{{"model", state_of(net)}};
                              }),
            "[checkpoint::save] ranks save different things: \"model.weight\" is f32[2,3] on rank 0, and f32[3,3] on "
            "rank 1");
  EXPECT_EQ(save_error_on_all(2,
                              [](const Group& world) {
                                static thread_local torch::nn::Linear net{nullptr};
                                net = seeded(1, [&] {
                                  return torch::nn::Linear(torch::nn::LinearOptions(3, 2).bias(world->getRank() == 0));
                                });
                                return checkpoint::Contents{{"model", state_of(net)}};
                              }),
            "[checkpoint::save] ranks save different things: rank 0 has \"model.bias\", and rank 1 does not, nor "
            "anything that rank 0 lacks");
}

// Of buffers the first rank's counts where ranks have copies; stages have none.
TEST(CheckpointStages, BuffersOfOneNameAreRefused) {
  EXPECT_EQ(save_error_on_all(2,
                              [](const Group& world) {
                                static thread_local std::shared_ptr<torch::nn::Module> net;
                                net = std::make_shared<torch::nn::Module>();
                                const int rank = world->getRank();
                                net->register_module("layer" + std::to_string(rank), torch::nn::Linear(3, 2));
                                net->register_buffer("mean", torch::full({2}, double(rank)));
                                return checkpoint::Contents{{"model", state_of(*net)}};
                              }),
            "[checkpoint::save] \"model.mean\", f32[2], has other values on rank 1 than on rank 0");
}

TEST(CheckpointStages, ARandomStateThatOnlySomeSaveIsRefused) {
  EXPECT_EQ(save_error_on_all(3,
                              [](const Group& world) {
                                static thread_local torch::nn::Linear net{nullptr};
                                net = torch::nn::Linear(3, 2);
                                rank_generator().set_current_seed(uint64_t(world->getRank()));
                                const std::string name = "stage" + std::to_string(world->getRank());
                                checkpoint::Contents contents{{name, state_of(net)}};
                                if (world->getRank() > 0) contents.push_back({"rng", checkpoint::random_state()});
                                return contents;
                              }),
            "[checkpoint::save] \"rng\" is saved by 2 of 3 ranks, and each has its own");
}

// Stages 0 and 1 with one weight in common, and an optimizer each.
TEST(CheckpointStages, MayShareWhatIsTheSame) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const int rank = world->getRank();
    const auto seed = uint64_t(rank);
    torch::nn::Module stage;
    auto tied = stage.register_module("tied", seeded(9, [] { return torch::nn::Linear(3, 2); }));
    auto own =
        stage.register_module("own" + std::to_string(rank), seeded(seed, [] { return torch::nn::Linear(2, 2); }));
    AdamW optimizer(stage.parameters(), AdamWOptions(0.1));
    const checkpoint::Contents contents = {{"model", state_of(stage)}, {"optim", state_of(optimizer)}};
    const auto error = [&] {
      const std::string text = error_text<c10::ValueError>([&] { checkpoint::save(folder / "d", contents); });
      return text.substr(0, text.find('\n'));
    };
    checkpoint::save(folder / "c", contents);
    int64_t names = 0;
    for (const auto& group : optimizer.param_groups()) names += int64_t(group.params().size());
    EXPECT_EQ(names, 4);
    if (rank == 1) optimizer.param_groups()[0].options().set_lr(0.2);
    EXPECT_EQ(error().find("[checkpoint::save] ranks save different things: \"optim.tied.weight\" has the options {"),
              0u)
        << error();
    optimizer.param_groups()[0].options().set_lr(0.1);
    if (rank == 1) {
      tied->forward(torch::ones({1, 3})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_NE(error().find("different things: \"optim.tied.weight\" has the state null on rank 0, and {"),
              std::string::npos)
        << error();
    checkpoint::load(folder / "c", contents);
    checkpoint::save(folder / "d", contents);
  });
}

// Copies that have drifted apart, on the axes of one mesh and on different meshes.
TEST(CheckpointStages, CopiesThatHaveDriftedAreRefused) {
  const auto drifted = [](const char* axes, const Placements& placements) {
    return save_error_on_all(4, [&, axes = std::string(axes)](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});
      const DeviceMesh chosen = axes == "both" ? mesh : mesh[axes];
      at::Tensor part =
          distribute_tensor(torch::zeros({6, 4}), chosen, placements, {.source = std::nullopt}).to_local();
      part = part.clone();
      if (world->getRank() == 3) part.view(-1)[1] += 1;
      return checkpoint::Contents{{"x", DTensor::from_local(part, chosen, placements)}};
    });
  };
  EXPECT_EQ(drifted("both", {Replicate(), Shard(0)}),
            "[checkpoint::save] \"values.x\", f32[6,4], has other values on rank 3 than on rank 1");
  EXPECT_EQ(drifted("tp", {Shard(1)}),
            "[checkpoint::save] \"values.x\", f32[6,4], has other values on rank 3 than on rank 1");
  EXPECT_EQ(drifted("both", {Replicate(), Replicate()}),
            "[checkpoint::save] \"values.x\", f32[6,4], has other values on rank 3 than on rank 0");
}

// Each pair of ranks has a mesh over a group of its own, in which both count from 0.
TEST(CheckpointStages, MeshesOverGroupsOfTheirOwn) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 32});
  const auto value = [](int stage) { return torch::arange(35, at::kFloat).reshape({7, 5}) + 100 * stage; };
  run_ranks(4, [&](const Group& world) {
    const int stage = world->getRank() / 2;
    const Group group = split_group(world, {{0, 1}, {2, 3}});
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    torch::nn::Module net;
    const std::string name = "w" + std::to_string(stage);
    net.register_parameter(name, distribute_tensor(value(stage), mesh, {Shard(1)}));
    checkpoint::save(folder / "c", {{"model", state_of(net)}}, {.process_group = world});
    torch::nn::Module other;
    const at::Tensor loaded =
        other.register_parameter(name, distribute_tensor(torch::zeros({7, 5}), mesh, {Shard(stage)}));
    checkpoint::load(folder / "c", {{"model", state_of(other)}}, {.process_group = world});
    expect_equal(full(loaded.detach()), value(stage));
  });
}

TEST(CheckpointStages, InMemoryEachRankGetsItsOwn) {
  run_ranks(2, [&](const Group& world) {
    Stage stage(world->getRank(), world->getRank() + 1);
    const std::string text = error_text<c10::ValueError>([&] { checkpoint::get_state({{"model", state_of(stage)}}); });
    EXPECT_EQ(
        text.find("[checkpoint::get_state] rank 1 holds other names than rank 0, as the stages of a pipeline do\n  "
                  "fix: pass {.full = false}, which gives each rank what it holds, or save a checkpoint, which has "
                  "all of it"),
        0u)
        << text;
    EXPECT_EQ(checkpoint::get_state({{"model", state_of(stage)}}, {.full = false})["model"].tensors.size(), 2u);
  });
}

TEST(CheckpointStages, ALoadThatLacksWhatNobodyWantsIsRefused) {
  const Folder folder;
  Stage whole(0, kLayers);
  checkpoint::save(folder / "c", {{"model", state_of(whole)}});
  run_ranks(2, [&](const Group& world) {
    // Layer 3 is forgotten; then rank 1 forgets what rank 0 has.
    Stage stage(world->getRank(), world->getRank() + 2);
    const std::string text = error_text<c10::ValueError>([&] {
      checkpoint::load(folder / "c", {{"model", state_of(stage)}});
    });
    EXPECT_EQ(text.find("[checkpoint::load] \"model\" has other names in the checkpoint: only "
                        "there: layer3.bias, layer3.weight\n"),
              0u)
        << text;
    Stage less(world->getRank(), kLayers);
    const std::string forgotten = error_text<c10::ValueError>([&] {
      checkpoint::load(folder / "c", {{"model", state_of(less)}});
    });
    EXPECT_NE(forgotten.find("only there: layer0.bias, layer0.weight\n"), std::string::npos) << forgotten;
    checkpoint::load(folder / "c", {{"model", state_of(less)}}, {.strict = false});
  });
}

}  // namespace
}  // namespace serried::testing
