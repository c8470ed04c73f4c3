// Checkpoints of one process, and of DTensors under every placement into every other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/plan.h"
#include "serried/checkpoint/reader.h"
#include "serried/checkpoint/writer.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/checkpoint/tensor_bytes.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

struct TinyImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};

  TinyImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    second = register_module("second", torch::nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(norm(first(x)))); }
};
TORCH_MODULE(Tiny);

void expect_same_modules(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto theirs = expected.named_parameters();
  ASSERT_EQ(actual.named_parameters().size(), theirs.size());
  for (const auto& item : actual.named_parameters())
    expect_equal(full(item.value().detach()), full(theirs[item.key()].detach()), item.key());
  const auto buffers = expected.named_buffers();
  for (const auto& item : actual.named_buffers())
    expect_equal(full(item.value()), full(buffers[item.key()]), item.key());
}

TEST(Checkpoint, AModuleComesBackAsItWas) {
  const Folder folder;
  Tiny saved;
  saved->norm->running_mean.fill_(3);
  saved->norm->num_batches_tracked.fill_(11);
  checkpoint::save(folder / "step1", {{"model", state_of(*saved)}});
  Tiny loaded;
  const at::Tensor weight = loaded->first->weight;
  const auto version = weight._version();
  checkpoint::load(folder / "step1", {{"model", state_of(loaded)}});
  expect_same_modules(*loaded, *saved);
  EXPECT_TRUE(weight.is_same(loaded->first->weight));
  EXPECT_GT(weight._version(), version);
  EXPECT_EQ(folder.names(), std::set<std::string>{"step1"});
}

TEST(Checkpoint, TheFolderHasSafetensorsFilesAndTheirIndex) {
  const Folder folder;
  Tiny net;
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"step", 3}});
  std::set<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(folder / "c")) names.insert(item.path().filename());
  EXPECT_EQ(names,
            (std::set<std::string>{"index.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}));
  const auto map = nlohmann::json::parse(content_of(folder / "c/model.safetensors.index.json"));
  EXPECT_EQ(map["weight_map"]["first.weight"], "model-00001-of-00001.safetensors");
  EXPECT_EQ(map["weight_map"].size(), 9u);
  const checkpoint::detail::TensorFile file(folder / "c/model-00001-of-00001.safetensors");
  // Eight bytes first, so that all lie aligned.
  EXPECT_EQ(file.header().tensors[0].name, "norm.num_batches_tracked");
  EXPECT_EQ(file.header().num_bytes % 64, 0);
}

TEST(Checkpoint, LargeEntriesAreCutIntoFiles) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 100, .block_bytes = 64, .short_run = 16});
  Tiny saved, loaded;
  checkpoint::save(folder / "c", {{"model", state_of(*saved)}});
  EXPECT_TRUE(std::filesystem::exists(folder / "c/model-00001-of-00005.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder / "c/model-00005-of-00005.safetensors"));
  checkpoint::load(folder / "c", {{"model", state_of(*loaded)}});
  expect_same_modules(*loaded, *saved);
}

TEST(Checkpoint, ValuesOfAllKindsComeBack) {
  const Folder folder;
  const at::Tensor table = torch::arange(6, torch::kLong).reshape({2, 3});
  checkpoint::save(folder / "c", {{"step", 200},
                                  {"lr", 0.1},
                                  {"whole", 2.0},
                                  {"note", "text"},
                                  {"flag", true},
                                  {"table", table},
                                  {"bytes", std::string("\xff\0x", 3)},
                                  {"nothing", c10::IValue()},
                                  {"infinite", -std::numeric_limits<double>::infinity()},
                                  {"list", std::vector<int64_t>{1, 2, 3}},
                                  {"words", std::vector<std::string>{"a", "b"}},
                                  {"run", {{"seed", 7}, {"$x", "y"}, {"inner", {{"t", table + 1}}}}}});
  const auto read = [&](const std::string& name) { return checkpoint::read_value(folder / "c", name); };
  EXPECT_EQ(read("step").toInt(), 200);
  EXPECT_EQ(read("lr").toDouble(), 0.1);
  EXPECT_EQ(read("whole").toDouble(), 2.0);
  EXPECT_EQ(read("note").toStringRef(), "text");
  EXPECT_TRUE(read("flag").toBool());
  expect_equal(read("table").toTensor(), table);
  EXPECT_EQ(read("bytes").toStringRef(), std::string("\xff\0x", 3));
  EXPECT_TRUE(read("nothing").isNone());
  EXPECT_EQ(read("infinite").toDouble(), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(read("list").toListRef()[2].toInt(), 3);
  EXPECT_EQ(read("words").toListRef()[1].toStringRef(), "b");
  EXPECT_EQ(read("run.seed").toInt(), 7);
  EXPECT_EQ(read("run").toGenericDict().at("$x").toStringRef(), "y");
  expect_equal(read("run.inner.t").toTensor(), table + 1);
}

TEST(Checkpoint, ALoadWritesVariablesAndTensors) {
  const Folder folder;
  const at::Tensor table = torch::randn({2, 3});
  checkpoint::save(
      folder / "c",
      {{"step", 200}, {"lr", 0.1}, {"note", "text"}, {"done", true}, {"table", table}, {"run", {{"t", table * 2}}}});
  int64_t step = 0;
  int small = 0;
  double lr = 0;
  std::string note;
  bool done = false;
  const at::Tensor loaded = torch::zeros({2, 3}), inner = torch::zeros({2, 3});
  checkpoint::load(
      folder / "c",
      {{"step", &step}, {"lr", &lr}, {"note", &note}, {"done", &done}, {"table", loaded}, {"run", {{"t", inner}}}});
  checkpoint::load(folder / "c", {{"step", &small}});
  EXPECT_EQ(small, 200);
  EXPECT_EQ(step, 200);
  EXPECT_EQ(lr, 0.1);
  EXPECT_EQ(note, "text");
  EXPECT_TRUE(done);
  expect_equal(loaded, table);
  expect_equal(inner, table * 2);
}

TEST(Checkpoint, TiedWeightsAreWrittenOnceAndFoundUnderBothNames) {
  const Folder folder;
  struct Two : torch::nn::Module {
    at::Tensor a, b;
    explicit Two(bool tied) {
      a = register_parameter("a", torch::randn({3, 2}));
      b = register_parameter("b", tied ? a : torch::randn({3, 2}));
    }
  };
  Two tied(true), apart(false), again(true);
  checkpoint::save(folder / "c", {{"model", state_of(tied)}});
  const checkpoint::detail::TensorFile file(folder / "c/model-00001-of-00001.safetensors");
  EXPECT_EQ(file.header().tensors.size(), 1u);
  checkpoint::load(folder / "c", {{"model", state_of(apart)}});
  expect_equal(apart.b.detach(), tied.a.detach());
  checkpoint::load(folder / "c", {{"model", state_of(again)}});
  expect_equal(again.a.detach(), tied.a.detach());
}

TEST(Checkpoint, DtypesComeBack) {
  const Folder folder;
  checkpoint::Contents contents, into;
  std::vector<at::Tensor> saved, loaded;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kComplexFloat}) {
    saved.push_back(torch::arange(5).to(dtype));
    loaded.push_back(torch::zeros({5}, dtype));
    contents.push_back({"t" + std::to_string(saved.size()), saved.back()});
    into.push_back({"t" + std::to_string(saved.size()), loaded.back()});
  }
  checkpoint::save(folder / "c", contents);
  checkpoint::load(folder / "c", into);
  ASSERT_EQ(saved.size(), 11u);
  for (size_t i = 0; i < saved.size(); ++i) expect_equal(loaded[i], saved[i]);
}

TEST(Checkpoint, OtherMemoryOrdersAndEmptyTensorsComeBack) {
  const Folder folder;
  const at::Tensor transposed = torch::randn({3, 4}).t(), empty = torch::zeros({0, 3}), number = torch::tensor(2.5);
  const at::Tensor into = torch::zeros({3, 4}).t(), none = torch::zeros({0, 3}), zero = torch::tensor(0.0);
  checkpoint::save(folder / "c", {{"a", transposed}, {"b", empty}, {"n", number}});
  checkpoint::load(folder / "c", {{"a", into}, {"b", none}, {"n", zero}});
  expect_equal(into, transposed);
  EXPECT_EQ(zero.item<double>(), 2.5);
}

TEST(Checkpoint, FloatsConvertOnRequest) {
  const Folder folder;
  const at::Tensor saved = torch::randn({4});
  checkpoint::save(folder / "c", {{"x", saved}});
  const at::Tensor half = torch::zeros({4}, at::kBFloat16), whole = torch::zeros({4}, at::kDouble);
  checkpoint::load(folder / "c", {{"x", half}}, {.convert = true});
  checkpoint::load(folder / "c", {{"x", whole}}, {.convert = true});
  expect_equal(half, saved.to(at::kBFloat16));
  expect_equal(whole, saved.to(at::kDouble));
}

TEST(Checkpoint, NamesAreRewrittenByPatterns) {
  const Folder folder;
  Tiny saved, loaded;
  torch::nn::Sequential wrapped(torch::nn::Linear(5, 7));
  checkpoint::save(folder / "c", {{"model", state_of(*saved->first)}});
  checkpoint::load(folder / "c", {{"model", state_of(*wrapped)}}, {.rename = {{"^(weight|bias)$", "0.$1"}}});
  expect_equal(wrapped[0]->as<torch::nn::Linear>()->weight.detach(), saved->first->weight.detach());
}

TEST(Checkpoint, OnlyAPrefixIsLoaded) {
  const Folder folder;
  Tiny saved, loaded;
  const at::Tensor second = loaded->second->weight.detach().clone();
  checkpoint::save(folder / "c", {{"model", state_of(*saved)}});
  checkpoint::load(folder / "c", {{"model", state_of(*loaded)}}, {.only = "first."});
  expect_equal(loaded->first->weight.detach(), saved->first->weight.detach());
  expect_equal(loaded->second->weight.detach(), second);
}

TEST(Checkpoint, ASaveReplacesAnOlderOne) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::ones({3})}, {"old", 1}});
  checkpoint::save(folder / "c", {{"x", torch::zeros({3})}});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 0);
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(Checkpoint, FoldersThatAKillHasLeftAreRemovedByTheNextSave) {
  const Folder folder;
  std::filesystem::create_directories(folder / "c.partial-0123456789abcdef");
  std::filesystem::create_directories(folder / "other.partial-0123456789abcdef");
  write_content(folder / "other.partial-0123456789abcdef/.lock", "");
  std::filesystem::create_directories(folder / "mine.partial-1");
  checkpoint::save(folder / "c", {{"step", 1}});
  EXPECT_EQ(folder.names(), (std::set<std::string>{"c", "mine.partial-1"}));
}

TEST(Checkpoint, OldOnesGoAsTheOptionsSay) {
  const Folder folder;
  for (int64_t step = 100; step <= 600; step += 100) {
    checkpoint::save(folder / ("step" + std::to_string(step)), {{"step", step}}, {.keep_last = 2, .keep_every = 300});
  }
  checkpoint::save(folder / "best", {{"step", 1}}, {.keep_last = 1});
  EXPECT_EQ(folder.names(), (std::set<std::string>{"best", "step300", "step500", "step600"}));
}

// A pointer that nobody knows would count as a truth value.
static_assert(!std::is_constructible_v<checkpoint::Value, float*>);
static_assert(!std::is_constructible_v<checkpoint::Value, std::vector<int>*>);

struct Way {
  Sizes mesh;
  Placements placements;
};

std::vector<Way> ways() {
  return {{{1}, {Shard(0)}},
          {{2}, {Shard(0)}},
          {{3}, {Shard(1)}},
          {{4}, {Shard(0)}},
          {{4}, {Replicate()}},
          {{2, 2}, {Shard(0), Shard(0)}},
          {{2, 2}, {Shard(1), Shard(0)}},
          {{2, 2}, {Replicate(), Shard(1)}},
          {{3}, {BalancedShard(0)}},
          {{2, 2}, {BalancedShard(0), Shard(1)}},
          {{3, 2}, {StridedShard(0, 2), Shard(0)}}};
}

const std::vector<at::Tensor>& tensors_to_save() {
  static const std::vector<at::Tensor> tensors = {torch::randn({7, 5}), torch::randn({2, 9, 4}),
                                                  torch::arange(33).reshape({3, 11}),
                                                  torch::randn({1, 6}).to(at::kBFloat16)};
  return tensors;
}

void save_in(const Way& way, const std::string& path) {
  on_mesh(way.mesh, [&](const DeviceMesh& mesh) {
    checkpoint::Contents contents;
    for (const at::Tensor& t : tensors_to_save())
      contents.push_back({"t" + std::to_string(contents.size()), place(t, mesh, way.placements)});
    checkpoint::save(path, contents);
  });
}

void expect_loads_in(const Way& way, const std::string& path) {
  on_mesh(way.mesh, [&](const DeviceMesh& mesh) {
    checkpoint::Contents contents;
    std::vector<at::Tensor> loaded;
    for (const at::Tensor& t : tensors_to_save()) {
      loaded.push_back(place(torch::zeros_like(t), mesh, way.placements));
      contents.push_back({"t" + std::to_string(contents.size()), loaded.back()});
    }
    checkpoint::load(path, contents);
    for (size_t i = 0; i < loaded.size(); ++i)
      expect_equal(full(loaded[i]), tensors_to_save()[i], to_string(way.placements));
  });
}

TEST(Checkpoint, EveryPlacementLoadsIntoEveryOther) {
  const Folder folder;
  for (int64_t block_bytes : {int64_t(48), int64_t(4) << 20}) {
    const SmallLimits limits({.file_bytes = 400, .block_bytes = block_bytes, .short_run = 32});
    std::string first;
    for (size_t i = 0; i < ways().size(); ++i) {
      const std::string path = folder / std::to_string(i);
      save_in(ways()[i], path);
      std::string content = content_of(path + "/values-00001-of-00003.safetensors");
      EXPECT_GT(content.size(), 100u);
      if (first.empty()) first = content;
      EXPECT_EQ(content, first) << "the bytes do not depend on who wrote them";
      for (const Way& way : ways()) expect_loads_in(way, path);
      // In one process, without a group.
      for (size_t t = 0; t < tensors_to_save().size(); ++t) {
        expect_equal(checkpoint::read_value(path, "t" + std::to_string(t)).toTensor(), tensors_to_save()[t]);
      }
    }
  }
}

TEST(Checkpoint, SubmeshesOfALargerOneAreCopies) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 16, .short_run = 32});
  const at::Tensor value = torch::randn({5, 4});
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    checkpoint::save(folder / "c", {{"x", distribute_tensor(value, mesh["tp"], {Shard(1)})}});
  });
  expect_equal(checkpoint::read_value(folder / "c", "x").toTensor(), value);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    const DTensor loaded = distribute_tensor(torch::zeros({5, 4}), mesh["dp"], {Shard(1)});
    checkpoint::load(folder / "c", {{"x", loaded}});
    expect_equal(full(loaded), value);
  });
}

TEST(Checkpoint, BuffersAreThoseOfRankZero) {
  const Folder folder;
  run_ranks(3, [&](const Group& group) {
    auto net = seeded(1, [] { return Tiny(); });
    net->norm->running_mean.fill_(group->getRank() + 1);
    checkpoint::save(folder / "c", {{"model", state_of(*net)}});
    net->norm->running_mean.fill_(-1);
    checkpoint::load(folder / "c", {{"model", state_of(*net)}});
    EXPECT_EQ(net->norm->running_mean.sum().item<double>(), 7);
  });
}

TEST(Checkpoint, ReplicasShareTheBlocks) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  const at::Tensor value = torch::randn({100});
  run_ranks(3, [&](const Group&) { checkpoint::save(folder / "c", {{"x", value}}); });
  expect_equal(checkpoint::read_value(folder / "c", "x").toTensor(), value);
}

TEST(CheckpointSave, RanksThatHaveTheSameWriteAsMuchEach) {
  const SmallLimits limits({.file_bytes = 1 << 30, .block_bytes = 1024, .short_run = 64});
  torch::nn::Sequential net(torch::nn::Linear(70, 110), torch::nn::Linear(110, 90), torch::nn::Linear(90, 3));
  run_ranks(4, [&](const Group& group) {
    const checkpoint::detail::Ranks ranks(group);
    const auto plan = checkpoint::detail::make_plan({{"model", checkpoint::state_of(*net)}}, ranks);
    const std::vector<int64_t> files = checkpoint::detail::planned_bytes_of(plan, ranks.is_first());
    ASSERT_EQ(files.size(), 1u);
    at::Tensor mine = torch::tensor(files);
    const at::Tensor all = all_gather(mine, group);
    EXPECT_LE((all.max() - all.min()).item<int64_t>(), 1024) << all;
    EXPECT_EQ(all.sum().item<int64_t>(), plan.files[0].num_bytes);
    EXPECT_GT(all.min().item<int64_t>(), 15000);
  });
}

TEST(CheckpointSave, RowsAreWrittenFromWhereTheyLie) {
  const Folder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(torch::ones({1024, 512}), mesh, {Shard(0)});
    const auto bytes = std::make_shared<TensorBytes>();
    const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
    checkpoint::save(folder / "c", {{"x", x}});
    EXPECT_LT(bytes->most, 64 << 10);
  });
}

}  // namespace
}  // namespace serried::testing
