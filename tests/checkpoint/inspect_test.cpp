// What the command line says of checkpoints.
#include "serried/checkpoint/inspect.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/random/random.h"
#include "tests/checkpoint/folder.h"

namespace serried::testing {
namespace {

using checkpoint::detail::differences;
using checkpoint::detail::TextOptions;
using checkpoint::detail::verify;
using Lines = std::vector<std::string>;

at::Tensor counted() {
  return torch::arange(40, at::kFloat);
}

TEST(CheckpointInspect, ListsValuesAndTensors) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  run_ranks(2, [&](const Group&) {
    checkpoint::save(folder / "c", {{"model", checkpoint::state_of(*net)}, {"step", 3}});
  });
  const std::string text = checkpoint::detail::listing(folder / "c");
  EXPECT_NE(text.find(" in 1 files, saved by 2 ranks\n  step = 3\nmodel\n  weight "), std::string::npos) << text;
  EXPECT_NE(text.find("f32[2,3]             24 B\n"), std::string::npos) << text;
}

TEST(CheckpointInspect, VerifiesEveryByte) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 200, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", counted()}, {"y", counted()}});
  int64_t seen = 0;
  EXPECT_EQ(verify(folder / "c", [&](int64_t done, int64_t, const std::string&) { seen = done; }), Lines{});
  EXPECT_GT(seen, 320);
  const std::string path = folder / "c/values-00002-of-00002.safetensors", whole = content_of(path);
  for (size_t byte = 0; byte < whole.size(); byte += 7) {
    std::string damaged = whole;
    damaged[byte] ^= 4;
    write_content(path, damaged);
    EXPECT_FALSE(verify(folder / "c").empty()) << byte;
  }
  std::string damaged = whole;
  damaged.back() ^= 4;
  write_content(path, damaged);
  const size_t begin = (whole.size() - 1) / 64 * 64;
  EXPECT_EQ(verify(folder / "c"), Lines{c10::str("values-00002-of-00002.safetensors: bytes ", begin, " to ",
                                                 whole.size(), ", of \"y\" and on, are not those that were saved")});
  std::filesystem::remove(path);
  EXPECT_EQ(verify(folder / "c"), Lines{c10::str("cannot open ", path, ": No such file or directory")});
}

// What a progress bar is drawn from.
TEST(CheckpointInspect, VerifyTellsHowFarItIsBlockByBlock) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", torch::zeros({160})}});
  std::vector<int64_t> steps;
  int64_t total = 0;
  verify(folder / "c", [&](int64_t done, int64_t of, const std::string& file) {
    if (done > 0) EXPECT_TRUE(file.starts_with("values")) << file;
    steps.push_back(done);
    total = of;
  });
  ASSERT_GT(steps.size(), 640u / 64);
  EXPECT_EQ(steps.front(), 0);
  EXPECT_EQ(steps.back(), total);
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_GT(steps[i], steps[i - 1]);
    EXPECT_LE(steps[i] - steps[i - 1], 64);
  }
}

TEST(CheckpointInspect, ShowsDifferences) {
  const Folder folder;
  checkpoint::save(folder / "a",
                   {{"x", counted()}, {"y", counted()}, {"only", counted()}, {"step", 3}, {"run", {{"lr", 0.5}}}});
  at::Tensor changed = counted();
  changed[3] += 0.5;
  run_ranks(2, [&](const Group&) {
    checkpoint::save(folder / "same",
                     {{"x", counted()}, {"y", counted()}, {"only", counted()}, {"step", 3}, {"run", {{"lr", 0.5}}}});
  });
  checkpoint::save(
      folder / "b",
      {{"x", changed}, {"y", counted().to(at::kDouble)}, {"more", counted()}, {"step", 4}, {"run", {{"lr", 0.25}}}});
  EXPECT_EQ(differences(folder / "a", folder / "same"), Lines{});
  EXPECT_EQ(
      differences(folder / "a", folder / "b"),
      (Lines{"run.lr: 0.5 and 0.25", "step: 3 and 4", "only: only in the first",
             "x: 1 of 40 elements differ, by at most 0.5", "y: f32[40] and f64[40]", "more: only in the second"}));
}

TEST(CheckpointInspect, PrintsValuesAndTensors) {
  const Folder folder;
  torch::nn::Linear net(2, 1);
  torch::nn::init::constant_(net->weight, 2.0);
  checkpoint::save(folder / "c", {{"model", checkpoint::state_of(*net)}, {"step", 3}, {"note", "text"}});
  EXPECT_EQ(checkpoint::detail::text_of(folder / "c", "step"), "3\n");
  EXPECT_EQ(checkpoint::detail::text_of(folder / "c", "note"), "text\n");
  EXPECT_EQ(checkpoint::detail::text_of(folder / "c", "model.weight"), "f32[1,2]\n[[2, 2]]\n");
  try {
    checkpoint::detail::text_of(folder / "c", "modle.weight");
    ADD_FAILURE();
  } catch (const checkpoint::detail::Failure& failure) {
    EXPECT_EQ(failure.text, folder / "c" + " has no \"modle.weight\"; it has: note, step, model.bias, model.weight");
    EXPECT_EQ(failure.fix, "name one of these; serried checkpoint ls shows all");
  }
}

TEST(CheckpointInspect, VerifiesTheFilesOfOtherReadersToo) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  checkpoint::save(folder / "c", {{"model", checkpoint::state_of(*net)}});
  const std::string path = folder / "c/model.safetensors.index.json", whole = content_of(path);
  for (size_t byte = 0; byte < whole.size(); byte += 5) {
    std::string damaged = whole;
    damaged[byte] ^= 4;
    write_content(path, damaged);
    EXPECT_EQ(verify(folder / "c"), Lines{c10::str("model.safetensors.index.json: bytes 0 to ", whole.size(),
                                                   " are not those that were saved")});
  }
  write_content(path, whole + " ");
  EXPECT_EQ(verify(folder / "c"),
            Lines{c10::str(path, " has ", whole.size() + 1, " bytes, and had ", whole.size(), " when it was saved")});
  std::filesystem::remove(path);
  EXPECT_EQ(verify(folder / "c"), Lines{c10::str("cannot open ", path, ": No such file or directory")});
}

TEST(CheckpointInspect, ShowsRandomStatesThatDiffer) {
  const Folder folder;
  for (const char* name : {"a", "b", "same"}) {
    torch::manual_seed(name[0] == 'b' ? 2 : 1);
    checkpoint::save(folder / name, {{"random", checkpoint::random_state()}});
  }
  EXPECT_EQ(differences(folder / "a", folder / "same"), Lines{});
  EXPECT_EQ(differences(folder / "a", folder / "b"), Lines{"random: what each rank has differs first on rank 0"});
  run_ranks(2, [&](const Group& group) {
    rank_generator().set_current_seed(uint64_t(group->getRank()));
    checkpoint::save(folder / "two", {{"random", checkpoint::random_state()}});
  });
  EXPECT_EQ(differences(folder / "a", folder / "two"), Lines{"random: of one rank for all, and of each of 2 ranks"});
}

TEST(CheckpointInspect, DamageIsNamedByAllThatReadsIt) {
  const Folder folder;
  checkpoint::save(folder / "a", {{"x", counted()}, {"y", counted()}});
  checkpoint::save(folder / "b", {{"x", counted()}, {"y", counted()}});
  const std::string path = folder / "b/values-00001-of-00001.safetensors";
  std::string damaged = content_of(path);
  damaged.back() ^= 4;
  write_content(path, damaged);
  const auto failure_of = [](const std::function<void()>& body) -> std::string {
    try {
      body();
    } catch (const checkpoint::detail::Failure& failure) {
      return failure.text;
    }
    return "none";
  };
  EXPECT_EQ(failure_of([&] { checkpoint::detail::text_of(folder / "b", "y"); }).find(path + " is damaged: bytes 0 to "),
            0u);
  EXPECT_EQ(failure_of([&] { differences(folder / "a", folder / "b"); }).find(path + " is damaged: bytes 0 to "), 0u);
}

TEST(CheckpointInspect, ComparesWhatIsNoNumberAndPrintsComplexNumbers) {
  const Folder folder;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto save = [&](const char* name, const std::vector<float>& numbers) {
    checkpoint::save(folder / name, {{"x", torch::tensor(numbers)}});
  };
  save("a", {nan, inf, 1, 2});
  save("b", {nan, inf, 1.5, 2});
  save("c", {0, inf, 1, 2});
  EXPECT_EQ(differences(folder / "a", folder / "b"), Lines{"x: 1 of 4 elements differ, by at most 0.5"});
  EXPECT_EQ(differences(folder / "a", folder / "c"), Lines{"x: 1 of 4 elements differ, 1 of them NaN on one side"});
  checkpoint::save(folder / "z", {{"z", torch::complex(torch::tensor({1.0f, 2.0f}), torch::tensor({3.0f, 4.0f}))}});
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(checkpoint::detail::text_of(folder / "z", "z"), "c64[2]\n[1+3i, 2+4i]\n");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(CheckpointInspect, OfManyNamesTheNearestAreShown) {
  const Folder folder;
  torch::nn::Sequential net;
  for (int i = 0; i < 15; ++i) net->push_back("block" + std::to_string(i), torch::nn::Linear(1, 1));
  net->push_back("norm", torch::nn::Linear(1, 1));
  checkpoint::save(folder / "c", {{"model", checkpoint::state_of(*net)}});
  const auto named = [&](const std::string& name) {
    try {
      return checkpoint::detail::text_of(folder / "c", name);
    } catch (const checkpoint::detail::Failure& failure) {
      return failure.text;
    }
  };
  EXPECT_EQ(named("orm.bias").find(folder / "c" + " has no \"orm.bias\"; the nearest of 32 names: model.norm.bias, "),
            0u)
      << named("orm.bias");
  EXPECT_EQ(named("model.nrom.weight")
                .find(folder / "c" + " has no \"model.nrom.weight\"; the nearest of 32 names: model.norm.weight, "),
            0u)
      << named("model.nrom.weight");
}

// An index that somebody has made, with its checksum.
TEST(CheckpointInspect, ComparesStateThatNobodyWrote) {
  const Folder folder;
  torch::nn::Linear net(2, 1);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  for (const char* name : {"a", "b"}) checkpoint::save(folder / name, {{"optim", checkpoint::state_of(optimizer)}});
  const std::string path = folder / "b/index.json", good = content_of(path), from = "\"owned\": {}";
  std::string text = "{" + good.substr(good.find(',') + 1);
  ASSERT_NE(text.find(from), std::string::npos);
  text.replace(text.find(from), from.size(), "\"owned\": {\"group0.param0\": true}");
  write_content(path, checkpoint::detail::with_checksum(text));
  EXPECT_FALSE(checkpoint::detail::differences(folder / "a", folder / "b").empty());
  EXPECT_TRUE(checkpoint::detail::differences(folder / "b", folder / "b").empty());
}

TEST(CheckpointLatest, IsTheOneThatWasSavedLast) {
  const Folder folder;
  EXPECT_EQ(checkpoint::latest(folder / "none"), std::nullopt);
  EXPECT_EQ(checkpoint::latest(folder / ""), std::nullopt);
  for (const char* name : {"step9", "step10", "best", "step2"}) checkpoint::save(folder / name, {{"a", 1}});
  std::filesystem::create_directories(folder / "step11.partial-0123456789abcdef");
  write_content(folder / "step11.partial-0123456789abcdef/index.json", content_of(folder / "step2/index.json"));
  std::filesystem::create_directories(folder / "notes");
  run_ranks(2, [&](const Group&) { EXPECT_EQ(checkpoint::latest(folder.path().string()), folder / "step2"); });
  // One that is damaged does not count.
  write_content(folder / "step2/index.json", "{");
  EXPECT_EQ(checkpoint::latest(folder.path().string()), folder / "best");
}

std::string shown(const std::string& folder, const std::string& name, const TextOptions& options = {}) {
  try {
    return checkpoint::detail::text_of(folder, name, options);
  } catch (const checkpoint::detail::Failure& failure) {
    return failure.text + "\n  fix: " + failure.fix;
  }
}

TEST(CheckpointInspect, ShowsElementsInRowsWithAllTheirDigits) {
  const Folder folder;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  checkpoint::save(folder / "c", {{"rows", torch::tensor({{0.1f, -2.0f}, {nan, inf}})},
                                  {"double", torch::tensor({0.1, 1e300}, at::kDouble)},
                                  {"half", torch::tensor({0.5f, 3.0f}).to(at::kHalf)},
                                  {"blocks", torch::arange(8).view({2, 2, 2})},
                                  {"truth", torch::tensor({true, false})},
                                  {"scalar", torch::tensor(7.25f)},
                                  {"empty", torch::zeros({2, 0})},
                                  {"complex", torch::complex(torch::tensor({0.1f}), torch::tensor({-2.0f}))},
                                  {"unsigned", torch::tensor({-1}, at::kLong).view(at::kUInt64)}});
  const auto expect = [&](const std::string& name, const std::string& text, const std::string& json) {
    EXPECT_EQ(shown(folder / "c", name), text);
    const std::string whole = shown(folder / "c", name, {.as_json = true});
    EXPECT_EQ(whole.substr(0, whole.find(",\"looks\"")), "{\"elements\":" + json);
  };
  expect("rows", "f32[2,2]\n[[0.1, -2],\n [nan, inf]]\n", R"([[0.1,-2.0],[{"$number":"nan"},{"$number":"inf"}]])");
  expect("double", "f64[2]\n[0.1, 1e+300]\n", "[0.1,1e+300]");
  expect("half", "f16[2]\n[0.5, 3]\n", "[0.5,3.0]");
  expect("blocks", "i64[2,2,2]\n[[[0, 1],\n  [2, 3]],\n\n [[4, 5],\n  [6, 7]]]\n", "[[[0,1],[2,3]],[[4,5],[6,7]]]");
  expect("truth", "bool[2]\n[true, false]\n", "[true,false]");
  expect("scalar", "f32[]\n7.25\n", "7.25");
  expect("empty", "f32[2,0]\n[[],\n []]\n", "[[],[]]");
  expect("complex", "c64[1]\n[0.1-2i]\n", "[[0.1,-2.0]]");
  expect("unsigned", "u64[1]\n[18446744073709551615]\n", "[18446744073709551615]");
}

TEST(CheckpointInspect, OfALargeTensorAnExcerptIsShown) {
  const Folder folder;
  checkpoint::save(
      folder / "c",
      {{"long", torch::arange(1001)}, {"most", torch::arange(1000)}, {"wide", torch::arange(2000).view({2, 1000})}});
  const std::string hint = "An excerpt: --all shows all ";
  EXPECT_EQ(shown(folder / "c", "long"), "i64[1001]\n[0, 1, 2, ..., 998, 999, 1000]\n" + hint + "1001 elements.\n");
  EXPECT_EQ(shown(folder / "c", "wide"),
            "i64[2,1000]\n[[0, 1, 2, ..., 997, 998, 999],\n [1000, 1001, 1002, ..., 1997, "
            "1998, 1999]]\n" +
                hint + "2000 elements.\n");
  EXPECT_EQ(shown(folder / "c", "most").find("..."), std::string::npos);
  const std::string all = shown(folder / "c", "long", {.all = true});
  EXPECT_NE(all.find(" 500, 501, "), std::string::npos);
  EXPECT_EQ(all.find(hint), std::string::npos);
}

// "model" has an "ema.w", and "model.ema" a "w".
TEST(CheckpointInspect, NamesOfTwoEntriesThatReadTheSameAreToldApart) {
  const Folder folder;
  const auto save = [&](const char* name, double inner, double outer) {
    torch::nn::Module model, ema, average;
    average.register_parameter("w", torch::full({1}, inner));
    const auto shared = std::make_shared<torch::nn::Module>(average);
    model.register_module("ema", shared);
    ema.register_parameter("w", torch::full({1}, outer));
    checkpoint::save(folder / name, {{"model", checkpoint::state_of(model)}, {"model.ema", checkpoint::state_of(ema)}});
  };
  save("a", 1, 2);
  save("b", 3, 2);
  save("c", 1, 4);
  EXPECT_EQ(differences(folder / "a", folder / "b"), Lines{"model.ema.w: 1 of 1 elements differ, by at most 2"});
  EXPECT_EQ(differences(folder / "a", folder / "c"), Lines{"model.ema.w: 1 of 1 elements differ, by at most 2"});
  EXPECT_EQ(
      shown(folder / "a", "model.ema.w"),
      folder / "a" + " has 2 things called \"model.ema.w\"\n  fix: name one by its entry: model/ema.w, model.ema/w");
  EXPECT_EQ(shown(folder / "a", "model/ema.w"), "f32[1]\n[1]\n");
  EXPECT_EQ(shown(folder / "a", "model.ema/w"), "f32[1]\n[2]\n");
}

TEST(CheckpointInspect, WhatDiffersInTheSameWayIsOneLineAndCanBeShown) {
  const Folder folder;
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.5));
  const auto save = [&](const char* name, int steps) {
    for (int i = 0; i < steps; ++i) {
      for (const at::Tensor& p : net->parameters()) p.mutable_grad() = torch::zeros_like(p);
      optimizer.step();
    }
    checkpoint::save(folder / name,
                     {{"model", checkpoint::state_of(*net)}, {"optim", checkpoint::state_of(optimizer)}});
  };
  const auto values_that_differ = [&](const char* first, const char* second) {
    Lines lines = differences(folder / first, folder / second);
    std::erase_if(lines, [](const std::string& line) { return line.find(" elements differ") != std::string::npos; });
    return lines;
  };
  save("0", 0);
  save("a", 20);
  save("b", 5);
  EXPECT_EQ(values_that_differ("a", "b"), Lines{"optim: step of 4 parameters: 20 and 25"});
  EXPECT_EQ(values_that_differ("0", "a")[0], "optim: state of 4 parameters: only in the second");
  auto& state = *optimizer.state().at(net->parameters()[0].unsafeGetTensorImpl());
  static_cast<torch::optim::AdamWParamState&>(state).step(3);
  for (auto& group : optimizer.param_groups()) group.options().set_lr(0.25);
  save("c", 0);
  EXPECT_EQ(values_that_differ("b", "c"),
            (Lines{"optim.0.weight.step: 25 and 3", "optim.groups.0.options.lr: 0.5 and 0.25"}));
  EXPECT_EQ(shown(folder / "c", "optim.0.weight.step"), "3\n");
  EXPECT_EQ(shown(folder / "c", "optim.groups.0.options.lr"), "0.25\n");
}

// What is tied in one of them and not in the other, though all that both have is equal.
TEST(CheckpointInspect, ShowsTiedNamesThatDiffer) {
  const Folder folder;
  const auto save = [&](const char* name, const std::vector<std::string>& tied) {
    torch::nn::Module net;
    const at::Tensor one = net.register_parameter("a", torch::ones({1}));
    const at::Tensor other = net.register_parameter("b", torch::ones({1}));
    for (const std::string& each : tied) net.register_parameter(each.substr(1), each[0] == 'a' ? one : other);
    checkpoint::save(folder / name, {{"net", checkpoint::state_of(net)}});
  };
  save("one", {"ahead", "atail"});
  save("same", {"ahead", "atail"});
  save("fewer", {"ahead"});
  save("other", {"ahead", "btail"});
  EXPECT_EQ(differences(folder / "one", folder / "same"), Lines{});
  EXPECT_EQ(differences(folder / "one", folder / "fewer"), Lines{"net.tail: is net.a in the first alone"});
  EXPECT_EQ(differences(folder / "fewer", folder / "one"), Lines{"net.tail: is net.a in the second alone"});
  EXPECT_EQ(differences(folder / "one", folder / "other"), Lines{"net.tail: is net.a, and net.b"});
}

TEST(CheckpointInspect, ShowsWhatAListNamesAndRefusesWhatNamesSeveral) {
  const Folder folder;
  torch::nn::Module net, other;
  const at::Tensor shared = net.register_parameter("emb", torch::ones({1}));
  net.register_parameter("head", shared);
  other.register_parameter("head", torch::zeros({1}));
  checkpoint::save(folder / "c", {{"net", checkpoint::state_of(net)}, {"run", {{"seed", 5}, {"lr", 0.5}}}});
  EXPECT_EQ(shown(folder / "c", "emb"), "f32[1]\n[1]\n");
  EXPECT_EQ(shown(folder / "c", "head"), "f32[1]\n[1]\n");
  EXPECT_EQ(shown(folder / "c", "net.head"), "f32[1]\n[1]\n");
  EXPECT_EQ(shown(folder / "c", "run.seed"), "5\n");
  EXPECT_EQ(shown(folder / "c", "run", {.as_json = true}), "{\"lr\":0.5,\"seed\":5}\n");
  checkpoint::save(folder / "d", {{"net", checkpoint::state_of(net)}, {"other", checkpoint::state_of(other)}});
  EXPECT_EQ(shown(folder / "d", "head"),
            folder / "d" + " has 2 things called \"head\"\n  fix: name one by its entry: net/head, other/head");
  const auto listing = nlohmann::json::parse(checkpoint::detail::listing_json(folder / "d"));
  EXPECT_EQ(listing["entries"]["net"]["aliases"]["head"], "emb");
  EXPECT_EQ(listing["entries"]["other"]["tensors"]["head"]["looks"], "f32[1]");
}

}  // namespace
}  // namespace serried::testing
