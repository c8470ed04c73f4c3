// What the command line says of checkpoints.
#include "serried/checkpoint/inspect.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/comm/groups/ranks.h"
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
