// async_save: what is written is what was there when it was called.
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>

#include <thread>

#include "serried/base/error.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/checkpoint/tensor_bytes.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

TEST(AsyncSave, WritesWhatWasThereWhenItWasCalled) {
  const Folder folder;
  const at::Tensor x = torch::ones({1000});
  const checkpoint::Saving saving = checkpoint::async_save(folder / "c", {{"x", x}, {"step", 4}});
  x.fill_(2);
  saving.wait();
  EXPECT_TRUE(saving.done());
  EXPECT_EQ(checkpoint::read_value(folder / "c", "x").toTensor().sum().item<double>(), 1000);
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), 4);
  saving.wait();
}

TEST(AsyncSave, RanksSaveTogetherManyTimes) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 32});
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      Placements placements(size_t(mesh.ndim()), Shard(0));
      placements.back() = Shard(1);
      const DTensor x = distribute_tensor(iota({7, 5}), mesh, placements);
      for (int64_t step = 0; step < 4; ++step) {
        const auto saving = checkpoint::async_save(folder / "c", {{"x", x}, {"step", step}});
        const at::NoGradGuard no_grad;
        x.add_(1);
        if (step % 2 == 0) saving.wait();
      }
      // Waits for the one before.
      const DTensor loaded = distribute_tensor(torch::zeros({7, 5}, at::kDouble), mesh, placements);
      int64_t step = 0;
      checkpoint::load(folder / "c", {{"x", loaded}, {"step", &step}});
      EXPECT_EQ(step, 3);
      expect_equal(full(loaded), iota({7, 5}) + 3);
    });
  }
}

TEST(AsyncSave, StagingIsOneRanksPartAndIsUsedAgain) {
  const Folder folder;
  constexpr int64_t kRows = 64, kColumns = 4096, kPart = kRows / 2 * kColumns * 4, kLittle = 4096;
  const SmallLimits limits({.file_bytes = 1 << 30, .block_bytes = kPart / 8, .short_run = 1 << 10});
  for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const DTensor x = distribute_tensor(torch::ones({kRows, kColumns}), mesh, {placement});
      const auto bytes = std::make_shared<TensorBytes>();
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
      checkpoint::async_save(folder / "c", {{"x", x}}).wait();
      EXPECT_GE(bytes->most, kPart - kLittle) << to_string(placement);
      EXPECT_LE(bytes->most, kPart + kPart / 8 + kLittle) << to_string(placement);
      const int64_t kept = bytes->now;
      bytes->most = kept;
      for (int i = 0; i < 3; ++i) checkpoint::async_save(folder / "c", {{"x", x}}).wait();
      EXPECT_EQ(bytes->now, kept);
      EXPECT_LE(bytes->most, kept + kLittle);
    });
  }
}

TEST(AsyncSave, WhatItKeepsGoesWithTheGroup) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  run_ranks(2, [&](const Group& world) {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> gone{Group()};
    const auto bytes = std::make_shared<TensorBytes>();
    const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
    {
      const Group group = split_group(world, {{0, 1}});
      gone = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
      checkpoint::async_save(folder / "c", {{"x", torch::ones({100000})}}, {.process_group = group}).wait();
      EXPECT_GE(bytes->now, 190000);
    }
    EXPECT_TRUE(gone.expired());
    EXPECT_LT(bytes->now, 1000);
  });
}

TEST(AsyncSave, TheNextSaveWaitsAlsoOneThatIsNone) {
  const Folder folder;
  run_ranks(2, [&](const Group&) {
    for (int64_t step = 0; step < 20; step += 2) {
      const auto saving = checkpoint::async_save(folder / "c", {{"x", torch::full({30000}, step)}, {"step", step}});
      checkpoint::save(folder / "c", {{"x", torch::full({30000}, step + 1)}, {"step", step + 1}});
      EXPECT_TRUE(saving.done());
      saving.wait();
      const at::Tensor x = torch::zeros({30000}, at::kLong);
      int64_t found = 0;
      checkpoint::load(folder / "c", {{"x", x}, {"step", &found}});
      EXPECT_EQ(found, step + 1);
      EXPECT_TRUE(x.eq(step + 1).all().item<bool>());
    }
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(AsyncSave, AValueIsReadWhenItIsThere) {
  const Folder folder;
  for (int64_t step = 0; step < 10; ++step) {
    const std::string path = folder / std::to_string(step);
    const auto saving = checkpoint::async_save(path, {{"x", torch::zeros({1000000})}, {"step", step}});
    EXPECT_EQ(checkpoint::read_value(path, "step").toInt(), step);
    EXPECT_TRUE(saving.done());
    saving.wait();
  }
}

TEST(AsyncSave, TheNextSaveWaitsAlsoOneOfAnotherGroupOfTheseRanks) {
  const Folder folder;
  run_ranks(2, [&](const Group& world) {
    const Group other = split_group(world, {{0, 1}});
    for (int64_t step = 0; step < 20; step += 2) {
      const auto saving = checkpoint::async_save(folder / "c", {{"x", torch::full({30000}, step)}, {"step", step}});
      checkpoint::save(folder / "c", {{"x", torch::full({30000}, step + 1)}, {"step", step + 1}},
                       {.process_group = other});
      EXPECT_TRUE(saving.done());
      saving.wait();
      const auto more = checkpoint::async_save(folder / "c", {{"step", step + 2}}, {.process_group = other});
      int64_t found = 0;
      checkpoint::load(folder / "c", {{"step", &found}});
      EXPECT_EQ(found, step + 2);
      EXPECT_TRUE(more.done());
      more.wait();
    }
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(AsyncSave, AnErrorSurfacesInWaitOnAllRanks) {
  const Folder folder;
  write_content(folder / "file", "x");
  run_ranks(2, [&](const Group&) {
    const auto saving = checkpoint::async_save(folder / "file/c", {{"a", 1}});
    const std::string text = error_text<c10::Error>([&] { saving.wait(); });
    EXPECT_EQ(text.find(c10::str("[checkpoint::async_save] rank 0: cannot make the folder ", folder / "file",
                                 ": Not a directory")),
              0u)
        << text;
    // The next one is free to succeed.
    checkpoint::async_save(folder / "c", {{"a", 1}}).wait();
  });
  EXPECT_EQ(checkpoint::read_value(folder / "c", "a").toInt(), 1);
}

// The threads of a process have one working directory, unless one asks for its own.
TEST(AsyncSave, APlaceThatOneRankCannotFindIsRaisedOnAll) {
  const Folder folder;
  run_ranks(
      2,
      [&](const Group& group) {
        const std::string gone = folder / "gone";
        std::thread([&] {
          const ThreadRankLabel label({.rank = group->getRank(), .world_size = 2});
          const ProcessGroupGuard current(group);
          if (group->getRank() == 1) {
            ASSERT_EQ(::unshare(CLONE_FS), 0);
            std::filesystem::create_directory(gone);
            std::filesystem::current_path(gone);
            std::filesystem::remove(gone);
          }
          const std::string text = error_text<c10::Error>([&] { (void)checkpoint::async_save("c", {{"a", 1}}); });
          EXPECT_EQ(
              text.find("[checkpoint::async_save] rank 1: cannot find the working directory for c: No such file or "
                        "directory\n"),
              0u)
              << text;
          EXPECT_EQ(error_text<c10::Error>([&] {
                      checkpoint::async_save(folder / "c", {{"a", 1}}).wait();
                    }),
                    "no error");
        }).join();
      },
      {.timeout = std::chrono::seconds(20)});
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(AsyncSave, ThreadsWithoutAGroupMaySaveAtTheSameTime) {
  const Folder folder;
  const auto save_often = [&](int thread) {
    for (int i = 0; i < 10; ++i) {
      const std::string path = folder / (std::to_string(thread) + "_" + std::to_string(i));
      checkpoint::async_save(path, {{"x", torch::full({5000 + 100 * thread}, 10 * thread + i)}}).wait();
    }
  };
  std::thread first([&] { save_often(1); }), second([&] { save_often(2); });
  first.join();
  second.join();
  for (int thread : {1, 2}) {
    for (int i = 0; i < 10; ++i) {
      const std::string path = folder / (std::to_string(thread) + "_" + std::to_string(i));
      expect_equal(checkpoint::read_value(path, "x").toTensor(), torch::full({5000 + 100 * thread}, 10 * thread + i));
    }
  }
}

TEST(AsyncSave, OneThatIsDroppedIsFinished) {
  const Folder folder;
  (void)checkpoint::async_save(folder / "c", {{"a", 1}});
  EXPECT_EQ(checkpoint::read_value(folder / "c", "a").toInt(), 1);
}

TEST(AsyncSave, OldOnesGoAsTheOptionsSay) {
  const Folder folder;
  for (int64_t step = 1; step <= 4; ++step) {
    (void)checkpoint::async_save(folder / ("step" + std::to_string(step)), {{"step", step}}, {.keep_last = 2});
  }
  EXPECT_EQ(folder.names(), (std::set<std::string>{"step3", "step4"}));
}

}  // namespace
}  // namespace serried::testing
