// Disks that are full, folders that vanish or cannot be written: the old checkpoint stays, and nothing else.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <functional>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/save_job.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/checkpoint/folder.h"
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

}  // namespace
}  // namespace serried::testing
