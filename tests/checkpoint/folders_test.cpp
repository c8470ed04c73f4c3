// What a save does with folders that are there: the one that it replaces, older ones, and what a kill has left.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/index.h"
#include "serried/comm/groups/ranks.h"
#include "tests/checkpoint/folder.h"
#include "tests/checkpoint/stand_in_disk.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

constexpr const char* kLeft = ".replaced-0123456789abcdef";

void save(const std::string& path, int64_t value, const checkpoint::SaveOptions& options = {}) {
  checkpoint::save(path, {{"v", value}, {"x", torch::full({3}, value)}}, options);
}

int64_t value_in(const std::string& path) {
  int64_t value = 0;
  checkpoint::load(path, {{"v", &value}});
  return value;
}

std::string captured(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(CheckpointFolders, WithoutExchangesANewOneTakesThePlaceOfAnOlder) {
  const Folder folder;
  save(folder / "c", 1);
  disk_calls().can_exchange = false;
  save(folder / "c", 2);
  disk_calls().can_exchange = true;
  EXPECT_EQ(value_in(folder / "c"), 2);
  EXPECT_EQ(folder.names(), Names{"c"});
}

// Between the two renames: the older one is aside, the newer one has not come yet.
TEST(CheckpointFolders, OneThatAKillHasLeftAsideIsFoundAndPutBack) {
  const Folder folder;
  save(folder / "c", 1);
  save(folder / "new", 2);
  fs::rename(folder / "c", folder / "c" + kLeft);
  fs::rename(folder / "new", folder / "c.partial-0123456789abcdef");
  EXPECT_EQ(value_in(folder / "c"), 1);
  EXPECT_EQ(checkpoint::read_value(folder / "c", "v").toInt(), 1);
  EXPECT_EQ(value_in(checkpoint::latest(folder.path().string()).value()), 1);
  save(folder / "other", 3);
  EXPECT_EQ(folder.names(), (Names{"c", "other"}));
  EXPECT_EQ(value_in(folder / "c"), 1);
}

// After both renames: the newer one is there.
TEST(CheckpointFolders, OneThatHasBeenReplacedIsRemoved) {
  const Folder folder;
  save(folder / "c", 1);
  fs::copy(folder / "c", folder / "c" + kLeft);
  save(folder / "c", 2);
  EXPECT_EQ(folder.names(), Names{"c"});
  fs::copy(folder / "c", folder / "c" + kLeft);
  EXPECT_EQ(checkpoint::latest(folder.path().string()), folder / "c");
  save(folder / "d", 3);
  EXPECT_EQ(folder.names(), (Names{"c", "d"}));
}

TEST(CheckpointFolders, TheLastOnesAreThoseThatWereSavedLast) {
  const Folder folder;
  const auto save_step = [&](int64_t step, int64_t keep_last) {
    save(folder / ("step" + std::to_string(step)), step, {.keep_last = keep_last});
  };
  for (int64_t step : {100, 200, 300, 400}) save_step(step, 2);
  EXPECT_EQ(folder.names(), (Names{"step300", "step400"}));
  // The training goes back to step 300, and on from there.
  save_step(310, 2);
  EXPECT_EQ(folder.names(), (Names{"step310", "step400"}));
  save_step(320, 2);
  EXPECT_EQ(folder.names(), (Names{"step310", "step320"}));
  save_step(5, 1);
  EXPECT_EQ(folder.names(), Names{"step5"});
  EXPECT_EQ(checkpoint::latest(folder.path().string()), folder / "step5");
}

// As one that was saved before the clock was set back, or while rank 0 was on another host.
TEST(CheckpointFolders, TheLastOneIsTheLastAlsoAfterTheClockWasSetBack) {
  const Folder folder;
  save(folder / "step1", 1);
  const std::string index = folder / "step1/index.json";
  std::string text = content_of(index);
  const size_t at = text.find("\"saved_at\": ") + 12;
  ASSERT_EQ(text.substr(at, 1), "1") << text.substr(at, 19);  // until the year 2033
  text[at] = '2';
  write_content(index, checkpoint::detail::with_checksum("{" + text.substr(text.find(',') + 1)));
  fs::last_write_time(index, fs::last_write_time(index) + std::chrono::nanoseconds(1'000'000'000'000'000'000));
  EXPECT_EQ(value_in(folder / "step1"), 1);
  for (int64_t step : {2, 3, 4}) {
    save(folder / ("step" + std::to_string(step)), step, {.keep_last = 2});
    EXPECT_EQ(checkpoint::latest(folder.path().string()), folder / ("step" + std::to_string(step)));
  }
  EXPECT_EQ(folder.names(), (Names{"step3", "step4"}));
}

TEST(CheckpointFolders, WhatElseIsInsideIsNotLost) {
  const Folder folder;
  save(folder / "c1", 1);
  save(folder / "c1/inner", 2);
  write_content(folder / "c1/notes.txt", "precious");
  EXPECT_EQ(error_text<c10::ValueError>([&] { save(folder / "c1", 3); }),
            c10::str("[checkpoint::save] ", folder / "c1",
                     " has more in it than its checkpoint: inner, notes.txt\n  fix: move it elsewhere, or save to "
                     "another path: a save replaces the whole folder"));
  EXPECT_EQ(value_in(folder / "c1"), 1);
  // Nor do older ones go that have more in them.
  const std::string text = captured([&] { save(folder / "c2", 4, {.keep_last = 1}); });
  EXPECT_NE(text.find(c10::str(folder / "c1", " stays: it has more in it than its checkpoint: inner, notes.txt")),
            std::string::npos)
      << text;
  EXPECT_EQ(value_in(folder / "c1/inner"), 2);
  EXPECT_EQ(content_of(folder / "c1/notes.txt"), "precious");
}

TEST(CheckpointFolders, AnOlderOneThatCannotBeRemovedIsAWarning) {
  const Folder folder;
  save(folder / "c1", 1);
  disk_calls().cannot_rename = "/c1";
  const std::string text = captured([&] { save(folder / "c2", 2, {.keep_last = 1}); });
  disk_calls().cannot_rename = "";
  EXPECT_NE(text.find(c10::str("[checkpoint] ", folder / "c2", " is saved, but of the older ones ", folder / "c1",
                               " stays: cannot rename a folder to ", folder / "c1.partial-")),
            std::string::npos)
      << text;
  EXPECT_EQ(value_in(folder / "c2"), 2);
  save(folder / "c3", 3, {.keep_last = 1});
  EXPECT_EQ(folder.names(), Names{"c3"});
}

TEST(CheckpointFolders, ALinkIsNotReplaced) {
  const Folder folder;
  save(folder / "real", 1);
  fs::create_directory_symlink(folder / "real", folder / "link1");
  fs::create_directory_symlink(folder / "nowhere", folder / "dangling");
  EXPECT_EQ(error_text<c10::ValueError>([&] { save(folder / "link1", 2); }),
            c10::str("[checkpoint::save] ", folder / "link1", " is a symbolic link to ", folder / "real",
                     "\n  fix: save to what it leads to: a save replaces what is at the path, here the link"));
  EXPECT_EQ(
      error_text<c10::ValueError>([&] {
        save(folder / "dangling", 2);
      }).find(c10::str("[checkpoint::save] ", folder / "dangling", " is a symbolic link to ", folder / "nowhere")),
      0u);
  save(folder / "link2", 2, {.keep_last = 1});
  EXPECT_EQ(folder.names(), (Names{"real", "link1", "link2", "dangling"}));
  EXPECT_EQ(value_in(folder / "link1"), 1);
}

TEST(CheckpointFolders, APathWithANulIsRefused) {
  const Folder folder;
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              save(folder / std::string("a\0b", 3), 2);
            }).find(c10::str("[checkpoint::save] the path \"", folder / "a?b", "\" has a NUL byte in it\n  fix: ")),
            0u);
  EXPECT_EQ(folder.names(), Names{});
}

// Jobs that save beside each other remove the same leftovers.
TEST(CheckpointFolders, SavesBesideEachOtherSayNothing) {
  const Folder folder;
  const std::string text = captured([&] {
    const auto save_often = [&](const std::string& name) {
      EXPECT_EQ(error_text<c10::Error>([&] {
                  for (int i = 0; i < 60; ++i) save(folder / name, i);
                }),
                "no error");
    };
    std::thread first([&] { save_often("a"); }), second([&] { save_often("b"); }), third([&] { save_often("c"); });
    first.join();
    second.join();
    third.join();
  });
  EXPECT_EQ(text.find("cannot remove"), std::string::npos) << text;
  EXPECT_EQ(folder.names(), (Names{"a", "b", "c"}));
}

TEST(CheckpointFolders, HowManyStayIsNoNegativeNumberAndNeedsNames) {
  const Folder folder;
  for (const checkpoint::SaveOptions& options :
       {checkpoint::SaveOptions{.keep_last = -1}, checkpoint::SaveOptions{.keep_every = -1}}) {
    const std::string name = options.keep_last < 0 ? "keep_last" : "keep_every";
    EXPECT_EQ(error_text<c10::ValueError>([&] { save(folder / "c", 1, options); }),
              "[checkpoint::save] " + name + " is -1\n  fix: pass how many, or 0 to remove nothing");
  }
  const std::string text = captured([&] { save(folder / "newest", 1, {.keep_last = 1}); });
  EXPECT_NE(text.find("[checkpoint] keep_last removes nothing: "), std::string::npos) << text;
  EXPECT_NE(text.find("newest has no number at the end of its name"), std::string::npos) << text;
}

TEST(CheckpointFolders, OneThatALoadFindsExists) {
  const Folder folder;
  const auto exists = [&](const std::string& name) {
    std::vector<char> of_ranks(2, 'x');
    run_ranks(2, [&](const Group& world) { of_ranks[size_t(world->getRank())] = checkpoint::exists(folder / name); });
    EXPECT_EQ(of_ranks[0], of_ranks[1]);
    return of_ranks[0] == char(true);
  };
  save(folder / "c", 1);
  fs::create_directories(folder / "empty");
  write_content(folder / "file", "x");
  EXPECT_TRUE(exists("c"));
  EXPECT_TRUE(exists("c/"));
  for (const char* name : {"none", "none/none", "empty", "file", "file/x", "d.partial-0123456789abcdef"}) {
    EXPECT_FALSE(exists(name)) << name;
  }
  fs::rename(folder / "c", folder / "c" + kLeft);
  EXPECT_TRUE(exists("c"));
  write_content(folder / "c" + kLeft + "/index.json", "{");
  EXPECT_TRUE(exists("c"));  // a training that began anew would write over what is left of it
}

TEST(CheckpointFolders, NoCallTakesAPathWithANul) {
  const Folder folder;
  save(folder / "c", 1);
  const std::string path = folder / std::string("c\0zzz", 5), root = folder.path().string() + std::string("\0zzz", 4);
  torch::nn::Linear net(1, 1);
  const auto refused = [](const char* where, const std::string& shown, const std::function<void()>& body) {
    EXPECT_EQ(error_text<c10::ValueError>(body),
              c10::str("[", where, "] the path \"", shown, "\" has a NUL byte in it\n  fix: pass one without"));
  };
  refused("checkpoint::load", folder / "c?zzz", [&] { value_in(path); });
  refused("checkpoint::read_value", folder / "c?zzz", [&] { checkpoint::read_value(path, "v"); });
  refused("checkpoint::exists", folder / "c?zzz", [&] { checkpoint::exists(path); });
  refused("checkpoint::latest", folder.path().string() + "?zzz", [&] { checkpoint::latest(root); });
  refused("load_safetensors", folder / "c?zzz", [&] { load_safetensors(path, *net); });
  refused("save_safetensors", folder / "c?zzz", [&] { save_safetensors(path, *net); });
}

TEST(CheckpointFolders, KeepingEveryNthAloneRemovesNothingAndSaysSo) {
  const Folder folder;
  const std::string text = captured([&] {
    for (int64_t step : {1, 2, 3}) save(folder / ("step" + std::to_string(step)), step, {.keep_every = 2});
  });
  EXPECT_EQ(folder.names(), (Names{"step1", "step2", "step3"}));
  EXPECT_NE(text.find("[checkpoint] keep_every removes nothing without keep_last, which says how many of the others "
                      "stay"),
            std::string::npos)
      << text;
}

TEST(CheckpointFolders, OneOfSeveralRanksThatSavesAloneIsWarned) {
  const Folder folder;
  const ScopedEnv env{{"WORLD_SIZE", "4"}};
  const std::string text = captured([&] { save(folder / "c", 1); });
  EXPECT_NE(text.find("[checkpoint] saves alone, and is one of 4 ranks: those that save together call it inside of a "
                      "ProcessGroupGuard, or pass .process_group"),
            std::string::npos)
      << text;
  run_ranks(2, [&](const Group&) { save(folder / "c", 2); });
  EXPECT_EQ(value_in(folder / "c"), 2);
}

}  // namespace
}  // namespace serried::testing
