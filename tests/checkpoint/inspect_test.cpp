// What the command line says of checkpoints.
#include "serried/checkpoint/inspect.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/random/random.h"
#include "tests/checkpoint/folder.h"

namespace serried::testing {
namespace {

using checkpoint::detail::differences;
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
                                                 whole.size(), " are not those that were saved")});
  std::filesystem::remove(path);
  EXPECT_EQ(verify(folder / "c"), Lines{c10::str("cannot open ", path, ": No such file or directory")});
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
  EXPECT_EQ(checkpoint::detail::text_of(folder / "c", "model.weight"), "f32[1,2]\n 2  2\n[ CPUFloatType{1,2} ]\n");
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
  EXPECT_EQ(checkpoint::detail::text_of(folder / "z", "z"),
            "c64[2], real and imaginary parts in the last dim\n 1  3\n 2  4\n[ CPUFloatType{2,2} ]\n");
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
  EXPECT_EQ(named("norm.bias").find(folder / "c" + " has no \"norm.bias\"; the nearest of 32 names: model.norm.bias, "),
            0u)
      << named("norm.bias");
  EXPECT_EQ(named("model.nrom.weight")
                .find(folder / "c" + " has no \"model.nrom.weight\"; the nearest of 32 names: model.norm.weight, "),
            0u)
      << named("model.nrom.weight");
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

}  // namespace
}  // namespace serried::testing
