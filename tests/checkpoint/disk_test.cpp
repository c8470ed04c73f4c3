// Disks that are full, folders that vanish or cannot be written: the old checkpoint stays, and nothing else.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>
#include <thread>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/save_job.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/checkpoint/disk_calls.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

// No file of this process may grow beyond a size, as on a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit small{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

// A save of which one rank does something else before it writes.
std::string error_of_save(const Folder& folder, const Group& group,
                          const std::function<void(const std::string&)>& before) {
  namespace detail = checkpoint::detail;
  const detail::Ranks ranks(group);
  const detail::SavePlan plan = detail::make_plan({{"x", torch::zeros({1000})}}, ranks);
  try {
    detail::write_checkpoint(folder / "c", detail::order_of(plan, ranks.is_first()), ranks,
                             [&](detail::Writer& writer) {
                               for (const std::string& name : folder.names()) {
                                 if (detail::is_partial_name(name)) before(folder / name);
                               }
                               detail::for_each_piece(plan, ranks.is_first(),
                                                      [&](size_t file, int64_t offset, const char* data, int64_t size) {
                                                        writer.take(file, offset, data, size);
                                                      });
                             });
  } catch (const detail::Failure& failure) {
    return failure.text;
  }
  return "no error";
}

constexpr const char* kOnlyFile = "/values-00001-of-00001.safetensors";

TEST(CheckpointDisk, AnAbsentParentThatCannotBeMade) {
  const Folder folder;
  write_content(folder / "file", "x");
  run_ranks(2, [&](const Group&) {
    const std::string text = error_text<c10::Error>([&] { checkpoint::save(folder / "file/c", {{"a", 1}}); });
    EXPECT_EQ(
        text.find(c10::str("[checkpoint::save] rank 0: cannot make the folder ", folder / "file", ": Not a directory")),
        0u)
        << text;
  });
}

TEST(CheckpointDisk, AFullDiskRaisesOnAllRanksAndLeavesTheOldOne) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::ones({10})}});
  run_ranks(2, [&](const Group& group) {
    const at::Tensor large = torch::zeros({100000}, at::kDouble);
    std::optional<FullDisk> full;
    if (group->getRank() == 0) full.emplace(4096);
    barrier(group);
    const std::string text = error_text<c10::Error>([&] { checkpoint::save(folder / "c", {{"x", large}}); });
    barrier(group);
    EXPECT_EQ(text.find("[checkpoint::save] rank 0: cannot make room in "), 0u) << text;
    EXPECT_NE(text.find(": File too large\n  fix: "), std::string::npos) << text;
  });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 10);
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  checkpoint::save(folder / "c", {{"x", torch::zeros({10})}});
}

TEST(CheckpointDisk, ADiskThatFillsUpWhileItIsWrittenLeavesTheOldOne) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::ones({10})}});
  run_ranks(2, [&](const Group& group) {
    const std::string text = error_of_save(folder, group, [&](const std::string& partial) {
      if (group->getRank() == 0) {
        std::filesystem::remove(partial + kOnlyFile);
        std::filesystem::create_symlink("/dev/full", partial + kOnlyFile);
      }
      barrier(group);
    });
    EXPECT_EQ(text.find("rank 0: cannot write "), 0u) << text;
    EXPECT_NE(text.find(": No space left on device"), std::string::npos) << text;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 10);
  run_ranks(2, [&](const Group&) { checkpoint::save(folder / "c", {{"x", torch::zeros({10})}}); });
}

TEST(CheckpointDisk, AShortWriteIsGoneOnWithAndThenNamed) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::ones({10})}});
  run_ranks(1, [&](const Group& group) {
    std::optional<FullDisk> full;
    const std::string text = error_of_save(folder, group, [&](const std::string&) { full.emplace(1000); });
    full.reset();
    EXPECT_EQ(text.find("cannot write "), 0u) << text;
    EXPECT_NE(text.find(": File too large"), std::string::npos) << text;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 10);
  run_ranks(1, [&](const Group&) { checkpoint::save(folder / "c", {{"x", torch::full({10}, 2)}}); });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 20);
}

TEST(CheckpointDisk, WhatTheMachineRefusesComesWithWhatHelps) {
  const auto text = [](int error) {
    try {
      checkpoint::detail::fail_with_errno("write", "ckpt/c", error);
    } catch (const checkpoint::detail::Failure& failure) {
      return failure.text + "; " + failure.fix;
    }
  };
  EXPECT_EQ(text(ENOSPC),
            "cannot write ckpt/c: No space left on device; free some space, or save to another disk; what was saved "
            "before is untouched");
  EXPECT_EQ(text(EROFS), "cannot write ckpt/c: Read-only file system; choose a folder that this user may write");
  EXPECT_EQ(text(EIO), "cannot write ckpt/c: Input/output error; the disk reports an error: use another one");
}

TEST(CheckpointDisk, AFolderThatCannotBeWritten) {
  run_ranks(2, [&](const Group&) {
    const std::string text = error_text<c10::Error>([&] { checkpoint::save("/sys/serried/c", {{"a", 1}}); });
    EXPECT_EQ(text.find("[checkpoint::save] rank 0: cannot make the folder /sys/serried: "), 0u) << text;
    EXPECT_NE(text.find("\n  fix: choose a folder that this user may write"), std::string::npos) << text;
  });
}

TEST(CheckpointDisk, AnErrorOfOneRankIsRaisedOnAllAndLeavesNothing) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", torch::ones({10})}});
  run_ranks(3, [&](const Group& group) {
    const std::string text = error_of_save(folder, group, [&](const std::string& partial) {
      barrier(group);
      if (group->getRank() == 1) std::filesystem::remove_all(partial);
      barrier(group);
    });
    EXPECT_NE(text.find("/values-00001-of-00001.safetensors: No such file or directory"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 0: cannot open "), 0u) << text;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 10);
  run_ranks(3, [&](const Group&) { checkpoint::save(folder / "c", {{"x", torch::full({10}, 2)}}); });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 20);
}

// With all that was saved before: the next save makes it anew.
TEST(CheckpointDisk, AParentThatVanishesWhileItIsWrittenIsNamedAndMadeAgain) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const std::string text = error_of_save(folder, group, [&](const std::string&) {
      barrier(group);
      if (group->getRank() == 0) std::filesystem::remove_all(folder.path());
      barrier(group);
    });
    EXPECT_EQ(text.find("rank 0: cannot open " + (folder / "c.partial-")), 0u) << text;
    EXPECT_NE(text.find(": No such file or directory"), std::string::npos) << text;
    checkpoint::save(folder / "c", {{"x", torch::ones({10})}});
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 10);
  std::filesystem::remove_all(folder.path());
  run_ranks(2, [&](const Group&) { checkpoint::async_save(folder / "c", {{"x", torch::ones({10})}}).wait(); });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(CheckpointDisk, AFolderThatVanishesBeforeTheEndIsNamed) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const std::string text = error_of_save(folder, group, [&](const std::string& partial) {
      barrier(group);
      if (group->getRank() == 0) std::filesystem::remove(partial + "/.lock");
    });
    EXPECT_EQ(text.find("rank 0: cannot finish "), 0u) << text;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{});
}

// While alive no file whose path has a text in it can be written.
class FullFor {
 public:
  explicit FullFor(std::string text) { disk_calls().is_full_for = std::move(text); }
  ~FullFor() { disk_calls().is_full_for.clear(); }
  FullFor(const FullFor&) = delete;
};

TEST(CheckpointDisk, ADiskThatIsFullForAnyFileLeavesTheOldOneInTheBackgroundToo) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  const auto contents = [&](int64_t step) -> checkpoint::Contents {
    return {{"model", checkpoint::state_of(*net)}, {"step", step}};
  };
  run_ranks(2, [&](const Group&) { checkpoint::save(folder / "c", contents(1)); });
  for (const std::string file : {"/model-00001-of-00001.safetensors", "/model.safetensors.index.json", "/index.json"}) {
    for (const bool is_async : {false, true}) {
      const FullFor full(file);
      run_ranks(2, [&](const Group&) {
        const std::string text = error_text<c10::Error>([&] {
          is_async ? checkpoint::async_save(folder / "c", contents(2)).wait()
                   : checkpoint::save(folder / "c", contents(2));
        });
        const std::string where = is_async ? "async_save" : "save";
        EXPECT_EQ(text.find("[checkpoint::" + where + "] rank 0: cannot write " + (folder / "c.partial-")), 0u) << text;
        EXPECT_NE(text.find(file + ": No space left on device\n  fix: free some space"), std::string::npos) << text;
      });
      EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
      EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 1);
    }
  }
  run_ranks(2, [&](const Group&) { checkpoint::async_save(folder / "c", contents(2)).wait(); });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 2);
}

// What a disk reports when it is asked whether all is on it.
class CannotSync {
 public:
  explicit CannotSync(std::string path) { disk_calls().cannot_sync = std::move(path); }
  ~CannotSync() { disk_calls().cannot_sync.clear(); }
  CannotSync(const CannotSync&) = delete;
};

TEST(CheckpointDisk, ADiskThatLosesWhatWasWrittenIsNamedAndTheOldOneStays) {
  const Folder folder;
  const auto contents = [](int64_t step) -> checkpoint::Contents {
    return {{"x", torch::full({10}, step)}, {"step", step}};
  };
  run_ranks(2, [&](const Group&) { checkpoint::save(folder / "c", contents(1)); });
  for (const std::string file : {"/values-00001-of-00001.safetensors", "/index.json"}) {
    for (const bool is_async : {false, true}) {
      const CannotSync lossy(file);
      run_ranks(2, [&](const Group&) {
        const std::string text = error_text<c10::Error>([&] {
          is_async ? checkpoint::async_save(folder / "c", contents(2)).wait()
                   : checkpoint::save(folder / "c", contents(2));
        });
        EXPECT_NE(text.find("] rank 0: cannot write " + (folder / "c.partial-")), std::string::npos) << text;
        EXPECT_NE(text.find(file + ": Input/output error\n  fix: the disk reports an error: use another one"),
                  std::string::npos)
            << text;
      });
      EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
      EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 1);
    }
  }
  run_ranks(2, [&](const Group&) { checkpoint::save(folder / "c", contents(2)); });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 2);
}

// The new one has its name, and the disk may forget that: the old one is not removed before it is sure.
TEST(CheckpointDisk, WhereTheNewNameMayBeLostTheOldOneStaysBesideIt) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"step", 1}});
  {
    const CannotSync lossy(std::filesystem::canonical(folder.path()).string());
    const std::string text = error_text<c10::Error>([&] { checkpoint::save(folder / "c", {{"step", 2}}); });
    EXPECT_EQ(text.find("[checkpoint::save] cannot write " + folder.path().string() + ": Input/output error"), 0u)
        << text;
  }
  ASSERT_EQ(folder.names().size(), 2u);
  for (const std::string& name : folder.names()) {
    EXPECT_EQ(checkpoint::read_value(folder / name, "step").toInt(), name == "c" ? 2 : 1) << name;
  }
  checkpoint::save(folder / "c", {{"step", 3}});
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 3);
}

TEST(CheckpointDisk, WritesOfWhichADiskTakesAPartAreGoneOnWith) {
  const Folder folder;
  const at::Tensor x = torch::arange(5000);
  disk_calls().most_of_a_write = 999;
  checkpoint::save(folder / "c", {{"x", x}});
  disk_calls().most_of_a_write = 0;
  expect_equal(checkpoint::read_value(folder / "c", "x").toTensor(), x);
}

TEST(CheckpointDisk, AFolderThatMayNotBeWrittenKeepsItsOldOne) {
  namespace fs = std::filesystem;
  const Folder folder;
  checkpoint::save(folder / "c", {{"step", 1}});
  fs::permissions(folder.path(), fs::perms(0555));
  std::thread([&] {
    // Of this thread alone, which ends; for root permissions do not count.
    constexpr long kNobody = 65534;
    ::syscall(SYS_setfsuid, kNobody);
    for (const bool is_async : {false, true}) {
      const std::string text = error_text<c10::Error>([&] {
        is_async ? checkpoint::async_save(folder / "c", {{"step", 2}}).wait()
                 : checkpoint::save(folder / "c", {{"step", 2}});
      });
      EXPECT_NE(text.find("] cannot make the folder " + (folder / "c.partial-")), std::string::npos) << text;
      EXPECT_NE(text.find(": Permission denied\n  fix: choose a folder that this user may write"), std::string::npos)
          << text;
    }
    int64_t step = 0;
    checkpoint::load(folder / "c", {{"step", &step}});
    EXPECT_EQ(step, 1);
  }).join();
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

// Where in `calls` the last one is that is `call`; -1: nowhere.
int64_t last_of(const std::vector<std::string>& calls, const std::string& call) {
  const auto found = std::find(calls.rbegin(), calls.rend(), call);
  return found == calls.rend() ? -1 : calls.rend() - found - 1;
}

TEST(CheckpointDisk, AllIsOnTheDiskBeforeItGetsItsNameAndThenTheName) {
  const Folder folder;
  torch::nn::Linear net(30, 20);
  const SmallLimits limits({.file_bytes = 1000, .block_bytes = 64, .short_run = 16});
  for (const std::string parent : {"new", "new", "."}) {
    const bool is_there = std::filesystem::exists(folder / (parent + "/c"));
    disk_calls().records = true;
    run_ranks(2, [&](const Group&) {
      checkpoint::save(folder / (parent + "/c"), {{"model", checkpoint::state_of(*net)}, {"step", 1}});
    });
    disk_calls().records = false;
    const std::vector<std::string> calls = disk_calls().taken();
    const auto renamed =
        std::find_if(calls.begin(), calls.end(), [](const std::string& call) { return call.starts_with("rename "); });
    ASSERT_NE(renamed, calls.end());
    const std::string from = renamed->substr(7, renamed->find(' ', 7) - 7),
                      partial = std::filesystem::weakly_canonical(from);
    EXPECT_NE(from.find("/c.partial-"), std::string::npos) << from;
    const int64_t folder_synced = last_of(calls, "fsync " + partial);
    EXPECT_GT(folder_synced, last_of(calls, "unlink " + from + "/.lock"));
    EXPECT_LT(folder_synced, renamed - calls.begin());
    int num_files = 0;
    for (const auto& item : std::filesystem::directory_iterator(folder / (parent + "/c"))) {
      const std::string file = partial + "/" + item.path().filename().string();
      EXPECT_GE(last_of(calls, "pwrite " + file), 0) << file;
      EXPECT_GT(last_of(calls, "fsync " + file), last_of(calls, "pwrite " + file)) << file;
      EXPECT_LT(last_of(calls, "fsync " + file), folder_synced) << file;
      ++num_files;
    }
    EXPECT_GT(num_files, 3);
    const std::string holder = std::filesystem::weakly_canonical(folder / parent);
    EXPECT_GT(last_of(calls, "fsync " + holder), renamed - calls.begin());
    // What it replaces is removed when the new one's name is on the disk.
    const int64_t first_removed =
        std::find_if(renamed, calls.end(), [](const std::string& call) { return call.starts_with("unlink "); }) -
        calls.begin();
    if (is_there) EXPECT_GT(first_removed, last_of(calls, "fsync " + holder));
    EXPECT_EQ(first_removed < int64_t(calls.size()), is_there);
    if (parent == "new" && !is_there) {
      EXPECT_GE(last_of(calls, "fsync " + std::filesystem::weakly_canonical(folder.path()).string()), 0);
    }
  }
}

TEST(CheckpointDisk, TheNamesOfAllNewFoldersAreOnTheDisk) {
  const Folder folder;
  disk_calls().records = true;
  checkpoint::save(folder / "a/b/d/c", {{"step", 1}});
  disk_calls().records = false;
  const std::vector<std::string> calls = disk_calls().taken();
  for (const char* made_in : {".", "a", "a/b"}) {
    const std::string synced = std::filesystem::canonical(folder / made_in).string();
    EXPECT_GE(last_of(calls, "fsync " + synced), 0) << synced;
  }
}

}  // namespace
}  // namespace serried::testing
