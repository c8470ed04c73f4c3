// Loads that ask for something else than what was saved: they get it, or are told.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/plan.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

std::string error_of_load(const std::string& path, const checkpoint::Contents& contents,
                          const checkpoint::LoadOptions& options = {}) {
  return error_text<c10::ValueError>([&] { checkpoint::load(path, contents, options); });
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

TEST(CheckpointLoad, OneEntryMayGoIntoTwoThings) {
  const Folder folder;
  torch::nn::Linear saved(3, 2), student(3, 2), average(3, 2), no_bias(torch::nn::LinearOptions(3, 2).bias(false));
  checkpoint::save(folder / "c", {{"model", state_of(saved)}, {"step", 7}});
  int64_t step = 0;
  int again = 0;
  checkpoint::load(folder / "c",
                   {{"model", state_of(student)}, {"model", state_of(average)}, {"step", &step}, {"step", &again}});
  expect_equal(student->weight.detach(), saved->weight.detach());
  expect_equal(average->bias.detach(), saved->bias.detach());
  EXPECT_EQ(step, 7);
  EXPECT_EQ(again, 7);
  // Each of them is compared by itself.
  const std::string expected = "[checkpoint::load] \"model\" has other names in the checkpoint: only there: bias";
  EXPECT_EQ(first_line(error_of_load(folder / "c", {{"model", state_of(no_bias)}, {"model", state_of(average)}})),
            expected);
  EXPECT_EQ(first_line(error_of_load(folder / "c", {{"model", state_of(average)}, {"model", state_of(no_bias)}})),
            expected);
}

// Bytes that this process has read so far, of files and of anything else.
int64_t bytes_read() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  int64_t value = -1;
  while (counters >> name >> value && name != "rchar:") {
  }
  return value;
}

// By all ranks, which are threads.
int64_t bytes_read_by(const Group& group, const std::function<void()>& fn) {
  barrier(group);
  const int64_t before = bytes_read();
  barrier(group);
  fn();
  barrier(group);
  return bytes_read() - before;
}

TEST(CheckpointLoad, ReadsLittleMoreThanItNeeds) {
  const Folder folder;
  constexpr int64_t kRows = 30, kRowBytes = 1 << 20;
  const at::Tensor value = torch::arange(kRows * kRowBytes / 4).view({kRows, -1}).to(at::kFloat);
  checkpoint::save(folder / "c", {{"x", value}, {"y", torch::zeros({1 << 20})}});
  for (int world_size = 1; world_size <= 4; ++world_size) {
    run_ranks(world_size, [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world_size}, {"dp"}, {.group = group});
      const DTensor loaded = distribute_tensor(torch::zeros_like(value), mesh, {Shard(0)});
      const int64_t bytes = bytes_read_by(group, [&] { checkpoint::load(folder / "c", {{"x", loaded}}); });
      EXPECT_GE(bytes, kRows * kRowBytes);
      EXPECT_LE(double(bytes), 1.05 * kRows * kRowBytes) << world_size;
      expect_equal(full(loaded), value);
    });
  }
}

// Each rank has a half of many tensors of 4 MiB: two seams in each of them, as in benchmarks/checkpoint.
TEST(CheckpointLoad, ReadsLittleMoreThanItNeedsWhereEachTensorHasSeams) {
  constexpr int64_t kTensors = 8, kWidth = 1024, kBytes = kTensors * kWidth * kWidth * 4;
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    torch::nn::Sequential net;
    for (int64_t i = 0; i < kTensors; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
      distribute_parameter((*net)[size_t(i)]->as<torch::nn::Linear>()->weight, mesh, {Shard(0)});
    }
    const checkpoint::Contents contents = {{"model", state_of(*net)}};
    checkpoint::save(folder / "c", contents);
    const int64_t bytes = bytes_read_by(group, [&] { checkpoint::load(folder / "c", contents); });
    EXPECT_GE(bytes, kBytes);
    EXPECT_LE(double(bytes), 1.05 * kBytes);
  });
}

struct PartsToRead {
  const char* name;
  Sizes sizes;  // of each of the tensors
  Placement placement;
  int from, to;  // ranks
};

// Parts and runs that are hardly longer than the blocks that have a hash.
TEST(CheckpointLoad, ReadsLittleMoreThanItNeedsWherePartsAreShort) {
  constexpr int kTensors = 16;
  const std::vector<PartsToRead> cases = {{"64 KiB of rows", {64, 1024}, Shard(0), 4, 4},
                                          {"64 and 48 KiB of rows", {192, 256}, Shard(0), 3, 4},
                                          {"runs of 64 KiB", {16, 2, 16384}, Shard(1), 2, 2},
                                          {"columns, brought to rows", {256, 512}, Shard(1), 2, 3}};
  for (const PartsToRead& parts : cases) {
    const Folder folder;
    const auto on_ranks = [&](int count, const std::function<void(const Group&, torch::nn::Module&)>& fn) {
      run_ranks(count, [&](const Group& group) {
        const DeviceMesh mesh = init_device_mesh("cpu", {count}, {"dp"}, {.group = group});
        torch::nn::Module net;
        for (int i = 0; i < kTensors; ++i) {
          at::Tensor& p = net.register_parameter("p" + std::to_string(i), at::full(parts.sizes, double(i)));
          distribute_parameter(p, mesh, {parts.placement});
        }
        fn(group, net);
      });
    };
    on_ranks(parts.from, [&](const Group&, torch::nn::Module& net) {
      checkpoint::save(folder / "c", {{"model", state_of(net)}});
    });
    const double needed = 4.0 * kTensors * double(c10::multiply_integers(parts.sizes));
    on_ranks(parts.to, [&](const Group& group, torch::nn::Module& net) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : net.parameters()) p.fill_(-1);
      const int64_t bytes = bytes_read_by(group, [&] { checkpoint::load(folder / "c", {{"model", state_of(net)}}); });
      EXPECT_GE(double(bytes), needed) << parts.name;
      EXPECT_LE(double(bytes), 1.05 * needed) << parts.name;
      for (int i = 0; i < kTensors; ++i) {
        EXPECT_TRUE(full(net.named_parameters()["p" + std::to_string(i)]).eq(double(i)).all().item<bool>());
      }
    });
  }
}

TEST(CheckpointLoad, OneOfTheFormatBeforeIsRead) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .leaf_bytes = 64, .short_run = 16});
  const at::Tensor value = torch::arange(100), loaded = torch::zeros({100}, at::kLong);
  checkpoint::save(folder / "c", {{"x", value}});
  const std::string path = folder / "c/index.json", now = content_of(path);
  std::string before = "{" + now.substr(now.find(',') + 1);
  const auto change = [&](const std::string& from, const std::string& to) {
    ASSERT_NE(before.find(from), std::string::npos) << from;
    before.replace(before.find(from), from.size(), to);
  };
  change("\"version\": 3", "\"version\": 2");
  change(" \"leaf_bytes\": 64,\n", "");
  write_content(path, checkpoint::detail::with_checksum(before));
  checkpoint::load(folder / "c", {{"x", loaded}});
  expect_equal(loaded, value);
  const std::string file = folder / "c/values-00001-of-00001.safetensors";
  std::string damaged = content_of(file);
  damaged.back() ^= 1;
  write_content(file, damaged);
  EXPECT_NE(error_of_load(folder / "c", {{"x", loaded}}).find(" is damaged: bytes "), std::string::npos);
}

TEST(CheckpointLoad, BlocksGrowWithWhatIsSaved) {
  using checkpoint::detail::block_bytes_for;
  constexpr int64_t kKiB = 1 << 10, kGiB = 1 << 30;
  EXPECT_EQ(block_bytes_for(0), 32 * kKiB);
  EXPECT_EQ(block_bytes_for(4 * kGiB), 32 * kKiB);
  EXPECT_EQ(block_bytes_for(64 * kGiB), 512 * kKiB);
  EXPECT_EQ(block_bytes_for(512 * kGiB), 4096 * kKiB);
  EXPECT_EQ(block_bytes_for(4096 * kGiB), 4096 * kKiB);
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 48, .short_run = 32});
  EXPECT_EQ(block_bytes_for(4096 * kGiB), 48);
}

TEST(CheckpointLoad, StatesAndValuesAreNotMixedUp) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  checkpoint::save(folder / "c", {{"model", state_of(net)}, {"step", 1}});
  int64_t step = 5;
  EXPECT_EQ(error_of_load(folder / "c", {{"model", &step}}),
            "[checkpoint::load] \"model\" is a state in the checkpoint, and is loaded into a value\n  fix: pass "
            "state_of(...) of the same kind of thing");
  EXPECT_EQ(step, 5);
  EXPECT_EQ(
      error_of_load(folder / "c", {{"step", state_of(net)}}),
      "[checkpoint::load] \"step\" is a value in the checkpoint, and is loaded into a state\n  fix: pass a pointer "
      "to a variable, or a tensor");
  const checkpoint::StateDict state = checkpoint::get_state({{"model", state_of(net)}, {"step", 1}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"model", &step}}, state);
            }),
            "[checkpoint::set_state] \"model\" is a state there, and is set into a value\n  fix: pass state_of(...) of "
            "the same kind of thing");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"step", state_of(net)}}, state);
            }),
            "[checkpoint::set_state] \"step\" is a value there, and is set into a state\n  fix: pass a pointer to a "
            "variable, or a tensor");
}

TEST(CheckpointLoad, ARankThatLeavesOutAnEntryIsNamed) {
  const Folder folder;
  torch::nn::Linear one(3, 2);
  AdamW alone(one->parameters(), AdamWOptions(0.1));
  checkpoint::save(folder / "c", {{"model", state_of(one)}, {"optim", state_of(alone)}, {"a", 1}, {"b", 2}});
  run_ranks(2, [&](const Group& world) {
    const bool is_first = world->getRank() == 0;
    torch::nn::Linear net(3, 2);
    AdamW optimizer(net->parameters(), AdamWOptions(0.1));
    checkpoint::Contents contents = {{"model", state_of(net)}};
    if (is_first) contents.push_back({"optim", state_of(optimizer)});
    EXPECT_EQ(error_of_load(folder / "c", contents)
                  .find("[checkpoint::load] rank 0 loads \"optim\", and rank 1 does not, nor anything that rank 0 does "
                        "not load\n  fix: load the same contents on every rank, or pass {.strict = false}"),
              0u);
    checkpoint::load(folder / "c", contents, {.strict = false});
    // Each has something of its own.
    int64_t value = 0;
    checkpoint::load(folder / "c", {{is_first ? "a" : "b", &value}});
    EXPECT_EQ(value, world->getRank() + 1);
  });
}

std::vector<at::Tensor> parameters_of(const std::vector<torch::nn::Linear>& nets) {
  std::vector<at::Tensor> all;
  for (const torch::nn::Linear& net : nets) {
    for (const at::Tensor& p : net->parameters()) all.push_back(p);
  }
  return all;
}

TEST(CheckpointLoad, OneStateOfAllParametersNeedsThemInTheirOrder) {
  const Folder folder;
  using torch::optim::LBFGS;
  torch::nn::Linear net(3, 2), other(3, 2);
  std::vector<at::Tensor> turned = other->parameters();
  std::reverse(turned.begin(), turned.end());
  LBFGS saved(net->parameters()), loaded(turned), straight(other->parameters());
  saved.step([&] {
    saved.zero_grad();
    const at::Tensor loss = net->forward(torch::ones({1, 3})).square().sum();
    loss.backward();
    return loss;
  });
  checkpoint::save(folder / "c", {{"model", state_of(net)}, {"optim", state_of(saved)}});
  EXPECT_EQ(
      error_of_load(folder / "c", {{"model", state_of(other)}, {"optim", state_of(loaded)}}),
      "[checkpoint::load] LBFGS has one state for all of its parameters in their order, and that is weight, bias "
      "in the checkpoint, and bias, weight here\n  fix: give the optimizer the same parameters in the same order");
  EXPECT_EQ(error_of_load(folder / "c", {{"model", state_of(other)}, {"optim", state_of(straight)}}, {.only = "weight"})
                .find("[checkpoint::load] LBFGS has one state for all of its parameters in their order, and that is "
                      "weight, bias in the checkpoint, and weight here\n"),
            0u);
  checkpoint::load(folder / "c", {{"model", state_of(other)}, {"optim", state_of(straight)}});
  EXPECT_EQ(straight.state().size(), 1u);
}

void step_with_gradients(torch::optim::Optimizer& optimizer) {
  double gradient = 1;
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& p : group.params()) p.mutable_grad() = torch::full_like(p, gradient++);
  }
  optimizer.step();
}

// SGD's momentum after one step is the gradient: 1 to 4 for a.weight, a.bias, b.weight, b.bias.
TEST(CheckpointLoad, OnlyAndRenameTakeTheNamesOfTheModuleAlsoForOptimizersOfTwo) {
  const Folder folder;
  torch::nn::Linear a(3, 2), b(3, 2), c(3, 2), d(3, 2);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD saved(parameters_of({a, b}), options);
  step_with_gradients(saved);
  checkpoint::save(folder / "c", {{"a", state_of(a)}, {"b", state_of(b)}, {"optim", state_of(saved)}});
  const auto momentum = [](torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
    const auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().view(-1)[0].item<double>();
  };
  torch::optim::SGD weights(parameters_of({c, d}), options);
  checkpoint::load(folder / "c", {{"a", state_of(c)}, {"b", state_of(d)}, {"optim", state_of(weights)}},
                   {.only = "weight"});
  EXPECT_EQ(weights.state().size(), 2u);
  EXPECT_EQ(momentum(weights, c->weight), 1);
  EXPECT_EQ(momentum(weights, d->weight), 3);
  torch::nn::Sequential e(torch::nn::Linear(3, 2)), f(torch::nn::Linear(3, 2));
  std::vector<at::Tensor> both = e->parameters();
  for (const at::Tensor& p : f->parameters()) both.push_back(p);
  torch::optim::SGD renamed(both, options);
  checkpoint::load(folder / "c", {{"a", state_of(e)}, {"b", state_of(f)}, {"optim", state_of(renamed)}},
                   {.rename = {{"^", "0."}}});
  EXPECT_EQ(momentum(renamed, both[1]), 2);
  EXPECT_EQ(momentum(renamed, both[3]), 4);
  // One of the two alone.
  torch::optim::SGD second(d->parameters(), options);
  checkpoint::load(folder / "c", {{"b", state_of(d)}, {"optim", state_of(second)}}, {.strict = false});
  EXPECT_EQ(momentum(second, d->weight), 3);
  EXPECT_EQ(momentum(second, d->bias), 4);
}

TEST(CheckpointLoad, APartOfASpreadStateIsNotTakenForAll) {
  run_ranks(2, [&](const Group& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    ZeroRedundancyOptimizer<AdamW> zero(net->parameters(), AdamWOptions(0.1), {.process_group = world}),
        again(net->parameters(), AdamWOptions(0.1), {.process_group = world});
    step_with_gradients(zero);
    AdamW plain(net->parameters(), AdamWOptions(0.1));
    const auto contents = [&](torch::optim::Optimizer& optimizer) {
      return checkpoint::Contents{{"model", state_of(net)}, {"optim", state_of(optimizer)}};
    };
    const checkpoint::StateDict part = checkpoint::get_state(contents(zero), {.full = false});
    const std::string text = error_text<c10::ValueError>([&] { checkpoint::set_state(contents(plain), part); });
    EXPECT_EQ(text.find("[checkpoint::set_state] rank 0: the state of \""), 0u) << text;
    EXPECT_NE(text.find("\" of an optimizer is on another rank than the one that this was taken from\n  fix: get_state "
                        "with {.full = true}, or set it into a ZeroRedundancyOptimizer that deals its parameters out "
                        "in the same way"),
              std::string::npos)
        << text;
    EXPECT_EQ(plain.state().size(), 0u);
    checkpoint::set_state(contents(again), part);
    checkpoint::set_state(contents(plain), checkpoint::get_state(contents(again)));
    EXPECT_EQ(plain.state().size(), 4u);
  });
}

TEST(StateInMemory, ValuesOfAllKindsAreSetAgain) {
  const at::Tensor table = torch::arange(4, at::kFloat), inner = table + 1;
  const checkpoint::StateDict state = checkpoint::get_state(
      {{"t", table}, {"run", {{"$x", 1}, {"$$y", 2}, {"$tensor", "no tensor"}, {"inner", {{"t", inner}}}}}});
  expect_equal(state.at("t").tensors.at("t"), table);
  at::Tensor loaded = torch::zeros({4}), loaded_inner = torch::zeros({4});
  int64_t x = 0, y = 0;
  std::string text;
  checkpoint::set_state(
      {{"t", loaded}, {"run", {{"$x", &x}, {"$$y", &y}, {"$tensor", &text}, {"inner", {{"t", loaded_inner}}}}}}, state);
  expect_equal(loaded, table);
  expect_equal(loaded_inner, inner);
  EXPECT_EQ(x, 1);
  EXPECT_EQ(y, 2);
  EXPECT_EQ(text, "no tensor");
  run_ranks(2, [&](const Group& world) {
    const at::Tensor sent = torch::zeros({4});
    checkpoint::set_state({{"t", sent}}, world->getRank() == 0 ? state : checkpoint::StateDict(),
                          {.from_first_rank = true});
    expect_equal(sent, table);
  });
}

TEST(StateInMemory, NamesThatReadTheSameAreRefused) {
  const at::Tensor one = torch::ones({1}), two = one + 1;
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::get_state({{"a", {{"b.c", one}, {"b", {{"c", two}}}}}});
            }),
            "[checkpoint::get_state] two tensors of \"a\" have the name \"a.b.c\"\n  fix: give them different names");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              checkpoint::get_state({{"a", one}, {"a", two}});
            }),
            "[checkpoint::get_state] the name \"a\" is there twice\n  fix: give each thing a name of its own");
}

TEST(StateInMemory, BuffersAreThoseOfRankZero) {
  run_ranks(3, [&](const Group& world) {
    torch::nn::Module net;
    net.register_buffer("b", torch::full({2}, world->getRank() + 5.0));
    expect_equal(checkpoint::get_state({{"m", state_of(net)}}).at("m").tensors.at("b"), torch::full({2}, 5.0));
    const auto own = checkpoint::get_state({{"m", state_of(net)}}, {.full = false});
    expect_equal(own.at("m").tensors.at("b"), torch::full({2}, world->getRank() + 5.0));
  });
}

// A batch of 4 ranks takes 4 of 23 samples at a time: the last ranks have one fewer.
TEST(CheckpointLoad, ASamplerThatRepeatsNothingIsSavedAnywhere) {
  const Folder folder;
  const auto sampler_of = [](int64_t rank) {
    return DistributedSampler(23, {.shuffle = false, .pad = false, .num_replicas = 4, .rank = rank});
  };
  const auto consumed_in = [&](const std::string& path) {
    const auto index = nlohmann::json::parse(content_of(path + "/index.json"));
    return index["entries"]["sampler"]["values"]["consumed"].get<int64_t>();
  };
  run_ranks(4, [&](const Group& world) {
    DistributedSampler sampler = sampler_of(world->getRank());
    const checkpoint::Contents contents = {{"sampler", state_of(sampler)}};
    for (int i = 0; i < 5; ++i) sampler.next(1);
    checkpoint::save(folder / "rounds", contents);  // rank 3 has no more
    sampler.next(1);
    checkpoint::save(folder / "end", contents);
    sampler.set_epoch(1);
    sampler.reset();
    sampler.next(2 + size_t(world->getRank()));
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                checkpoint::save(folder / "apart", contents);
              }).find("[checkpoint::save] ranks save different things: rank 0 has sampler = "),
              0u);
  });
  EXPECT_EQ(consumed_in(folder / "rounds"), 20);
  EXPECT_EQ(consumed_in(folder / "end"), 23);
  DistributedSampler alone(23, {.shuffle = false, .num_replicas = 1, .rank = 0});
  checkpoint::load(folder / "rounds", {{"sampler", state_of(alone)}});
  EXPECT_EQ(alone.next(100), (std::vector<size_t>{20, 21, 22}));
  checkpoint::load(folder / "end", {{"sampler", state_of(alone)}});
  EXPECT_EQ(alone.next(100), std::nullopt);
}

// Four ranks leave 2 of 10 samples out, which two ranks could share.
TEST(CheckpointLoad, WhatASamplerHasDroppedIsNoRestOfItsEpoch) {
  const Folder folder;
  const auto sampler_of = [](const Group& world) {
    return DistributedSampler(10, {.process_group = world, .seed = 3, .drop_last = true});
  };
  run_ranks(4, [&](const Group& world) {
    DistributedSampler sampler = sampler_of(world);
    sampler.set_epoch(6);
    sampler.reset();
    sampler.next(2);
    EXPECT_TRUE(sampler.is_at_end());
    checkpoint::save(folder / "end", {{"sampler", state_of(sampler)}});
  });
  run_ranks(2, [&](const Group& world) {
    DistributedSampler sampler = sampler_of(world);
    checkpoint::load(folder / "end", {{"sampler", state_of(sampler)}});
    EXPECT_EQ(sampler.epoch(), 6);
    EXPECT_TRUE(sampler.is_at_end());
    DistributedSampler loaders = sampler;  // its copy
    loaders.reset();
    EXPECT_EQ(loaders.next(1), std::nullopt);
    loaders.set_epoch(7);
    loaders.reset();
    EXPECT_EQ(loaders.next(10)->size(), 5u);
  });
}

// What comes behind the first samples of another order are not those that are left.
TEST(CheckpointLoad, ASamplerOfAnotherOrderDoesNotGoOnInTheMiddle) {
  const Folder folder;
  const auto sampler_of = [](size_t size, uint64_t seed, bool shuffle = true) {
    return DistributedSampler(size, {.shuffle = shuffle, .seed = seed, .num_replicas = 1, .rank = 0});
  };
  DistributedSampler saved = sampler_of(23, 5);
  checkpoint::save(folder / "begin", {{"sampler", state_of(saved)}});
  saved.next(4);
  checkpoint::save(folder / "middle", {{"sampler", state_of(saved)}});
  const auto load_into = [&](DistributedSampler sampler, const char* name, bool strict = true) {
    return error_of_load(folder / name, {{"sampler", state_of(sampler)}}, {.strict = strict});
  };
  const std::string start =
      "[checkpoint::load] a sampler is in the middle of an epoch of 23 samples, shuffled with seed 5 in the "
      "checkpoint, "
      "and has ";
  const std::string fix =
      " here\n  fix: make it of the same dataset with the same seed, or pass {.strict = false}: the samples that were "
      "used are then others than those that are left out";
  EXPECT_EQ(load_into(sampler_of(24, 5), "middle"), start + "24 samples, shuffled with seed 5" + fix);
  EXPECT_EQ(load_into(sampler_of(23, 6), "middle"), start + "23 samples, shuffled with seed 6" + fix);
  EXPECT_EQ(load_into(sampler_of(23, 5, false), "middle"), start + "23 samples, not shuffled" + fix);
  EXPECT_EQ(load_into(sampler_of(24, 6), "middle", false), "no error");
  EXPECT_EQ(load_into(sampler_of(24, 6), "begin"), "no error");
  EXPECT_EQ(load_into(sampler_of(23, 5), "middle"), "no error");
  DistributedSampler other = sampler_of(24, 5);
  const checkpoint::StateDict state = checkpoint::get_state({{"sampler", state_of(saved)}});
  EXPECT_NE(error_text<c10::ValueError>([&] {
              checkpoint::set_state({{"sampler", state_of(other)}}, state);
            }),
            "no error");
  checkpoint::set_state({{"sampler", state_of(other)}}, state, {.strict = false});
  EXPECT_EQ(other.consumed(), 4u);
}

TEST(CheckpointLoad, PathsOfOtherThingsAreNamed) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  checkpoint::save(folder / "run/step1", {{"model", state_of(net)}});
  checkpoint::save(folder / "run/step2", {{"model", state_of(net)}});
  save_safetensors(folder / "net.safetensors", *net);
  write_content(folder / "notes.txt", "x");
  EXPECT_EQ(error_of_load(folder / "run", {{"model", state_of(net)}}),
            c10::str("[checkpoint::load] ", folder / "run",
                     " has no index.json: it is no checkpoint; there are some in it: step1, step2\n  fix: pass the "
                     "folder of one of these; checkpoint::latest names the newest"));
  EXPECT_EQ(error_of_load(folder / "net.safetensors", {{"model", state_of(net)}}),
            c10::str("[checkpoint::load] ", folder / "net.safetensors",
                     " is a single file, and a checkpoint is a folder\n  fix: load a safetensors file with "
                     "load_safetensors(path, module)"));
  EXPECT_EQ(error_text<c10::ValueError>([&] { load_safetensors(folder / "run/step1", *net); }),
            c10::str("[load_safetensors] ", folder / "run/step1",
                     " is the folder of a checkpoint\n  fix: load it with checkpoint::load(path, {{\"model\", "
                     "state_of(module)}})"));
  EXPECT_EQ(
      error_text<c10::ValueError>([&] { load_safetensors(folder / "run", *net); }),
      c10::str("[load_safetensors] ", folder / "run",
               " is a folder without model.safetensors and model.safetensors.index.json\n  fix: pass a safetensors "
               "file"));
}

TEST(CheckpointLoad, ValuesThatNobodyWroteAreRefused) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", 1}});
  const std::string path = folder / "c/index.json", good = content_of(path);
  for (const char* forged : {R"({"$tensor": [1]})", R"({"$number": 1})", R"({"$bytes": {}})"}) {
    std::string text = "{" + good.substr(good.find(',') + 1);
    text.replace(text.find("\"x\": 1"), 6, std::string("\"x\": ") + forged);
    write_content(path, checkpoint::detail::with_checksum(text));
    double number = 0;
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                checkpoint::read_value(folder / "c", "x");
              }).find("[checkpoint::read_value] "),
              0u)
        << forged;
    EXPECT_EQ(error_of_load(folder / "c", {{"x", torch::zeros({1})}}).find("[checkpoint::load] "), 0u) << forged;
    EXPECT_EQ(error_of_load(folder / "c", {{"x", &number}}).find("[checkpoint::load] "), 0u) << forged;
  }
}

// Only an index that somebody has made, with its checksum, comes so far.
TEST(CheckpointLoad, StateThatNobodyWroteIsRefused) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  AdamW optimizer(net->parameters(), AdamWOptions(0.1));
  torch::optim::ReduceLROnPlateauScheduler plateau(optimizer);
  const checkpoint::Contents contents = {{"optim", state_of(optimizer)}, {"plateau", state_of(plateau)}};
  checkpoint::save(folder / "c", contents);
  const std::string path = folder / "c/index.json", good = content_of(path);
  const std::pair<std::string, std::string> forged[] = {{"\"amsgrad\": false", "\"amsgrad\": \"no\""},
                                                        {"\"cooldown\": 0", "\"cooldown\": []"},
                                                        {"\"bad_epochs\"", "\"good_epochs\""}};
  for (const auto& [from, to] : forged) {
    std::string text = "{" + good.substr(good.find(',') + 1);
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    write_content(path, checkpoint::detail::with_checksum(text));
    EXPECT_EQ(error_of_load(folder / "c", contents).find("[checkpoint::load] "), 0u) << to;
  }
}

}  // namespace
}  // namespace serried::testing
