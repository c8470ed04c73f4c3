// Processes that save without end are killed at random moments: the last checkpoint that they finished is always there.
//
// Ranks are threads of a process that is forked for each kill, which is a hundred times cheaper than a start; a program
// of its own, because a fork takes along no thread but the one that calls it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/inspect.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/checkpoint/stand_in_disk.h"

namespace serried {
namespace {

namespace fs = std::filesystem;

struct Net : torch::nn::Module {
  at::Tensor table = register_parameter("table", at::zeros({301, 1024}));  // cut over the ranks, unevenly
  at::Tensor bias = register_parameter("bias", at::zeros({40000}));        // whole on each
  at::Tensor count = register_buffer("count", at::zeros({}, at::kLong));

  void fill(int64_t value) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& t : parameters()) t.fill_(double(value));
    count.fill_(value);
  }
};

/// How a process saves for the `step`-th time.
struct Way {
  const char* name;
  void (*save)(const std::string& folder, const checkpoint::Contents& contents, int64_t step);
};

std::ostream& operator<<(std::ostream& out, const Way& way) {
  return out << way.name;
}

void save_numbered(const std::string& folder, const checkpoint::Contents& contents, int64_t step) {
  checkpoint::save(folder + "/step" + std::to_string(step), contents, {.keep_last = 2, .keep_every = 1000});
}
void save_over(const std::string& folder, const checkpoint::Contents& contents, int64_t) {
  checkpoint::save(folder + "/last", contents);
}
// On a file system that cannot exchange two folders.
void save_over_without_exchange(const std::string& folder, const checkpoint::Contents& contents, int64_t) {
  testing::disk_calls().can_exchange = false;
  checkpoint::save(folder + "/last", contents);
  testing::disk_calls().can_exchange = true;
}
// What the next one waits for.
void save_asynchronously(const std::string& folder, const checkpoint::Contents& contents, int64_t) {
  checkpoint::async_save(folder + "/last", contents).wait();
}

/// In memory that parent and child share.
struct Board {
  std::atomic<int64_t> committed = 0;
};

[[noreturn]] void save_without_end(const std::string& folder, const Way& way, int num_ranks, Board& board) {
  const int64_t begin = board.committed;
  run_ranks(num_ranks, [&](const Group& world) {
    Net net;
    const DeviceMesh mesh = init_device_mesh("cpu", {num_ranks}, {"dp"}, {.group = world});
    distribute_parameter(net.table, mesh, {Shard(0)});
    for (int64_t step = begin + 1;; ++step) {
      net.fill(step);
      way.save(folder, {{"model", checkpoint::state_of(net)}, {"step", step}}, step);
      if (world->getRank() == 0) board.committed = step;
    }
  });
  std::_Exit(1);
}

/// One save, in a process that is killed behind so many of its calls to the disk; 0: not at all.
[[noreturn]] void save_once(const std::string& folder, const Way& way, int num_ranks, int kill_after, Board& board) {
  const int64_t step = board.committed + 1;
  run_ranks(num_ranks, [&](const Group& world) {
    Net net;
    const DeviceMesh mesh = init_device_mesh("cpu", {num_ranks}, {"dp"}, {.group = world});
    distribute_parameter(net.table, mesh, {Shard(0)});
    net.fill(step);
    barrier(world);
    if (world->getRank() == 0) testing::disk_calls().kill_after = kill_after;
    barrier(world);
    way.save(folder, {{"model", checkpoint::state_of(net)}, {"step", step}}, step);
    if (world->getRank() == 0) board.committed = step;
  });
  std::_Exit(0);
}

class KilledSaves : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    board_ = new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board;
  }
  void TearDown() override { ::munmap(board_, sizeof(Board)); }

  /// Lets a process save for a while, and kills it.
  void save_and_kill(int num_ranks, int microseconds) {
    const int64_t before = board_->committed;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) save_without_end(folder_.path().string(), GetParam(), num_ranks, *board_);
    while (board_->committed == before && ::waitpid(child, nullptr, WNOHANG) == 0) ::usleep(200);
    ::usleep(useconds_t(microseconds));
    ASSERT_EQ(::kill(child, SIGKILL), 0) << "it ended by itself";
    ::waitpid(child, nullptr, 0);
  }

  /// Whether it was killed, and did not come to its end before.
  bool save_and_kill_behind(int num_ranks, int num_calls) {
    const pid_t child = ::fork();
    if (child == 0) save_once(folder_.path().string(), GetParam(), num_ranks, num_calls, *board_);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFSIGNALED(status)) EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    return WIFSIGNALED(status);
  }

  /// Every checkpoint there is, whole; the newest is the last that was finished, or the one that was being finished.
  void expect_whole() {
    int64_t newest = 0;
    int num_partial = 0, num_aside = 0;
    for (const auto& item : fs::directory_iterator(folder_.path())) {
      const std::string path = item.path().string();
      if (path.find(".partial-") != std::string::npos) {
        ++num_partial;
        continue;
      }
      num_aside += path.find(".replaced-") != std::string::npos;
      EXPECT_TRUE(checkpoint::detail::verify(path).empty()) << path;
      newest = std::max(newest, expect_one_value(path));
    }
    EXPECT_GE(newest, board_->committed);
    EXPECT_LE(newest, board_->committed + 1);
    EXPECT_LE(num_partial, 1);
    EXPECT_LE(num_aside, 1);
    board_->committed = newest;
  }

  void expect_nothing_left() const {
    for (const auto& item : fs::directory_iterator(folder_.path())) {
      const std::string name = item.path().filename().string();
      EXPECT_EQ(name.find(".partial-"), std::string::npos) << name;
      EXPECT_EQ(name.find(".replaced-"), std::string::npos) << name;
    }
  }

  /// What was saved in one step, and nothing of another.
  static int64_t expect_one_value(const std::string& path) {
    Net net;
    int64_t step = 0;
    checkpoint::load(path, {{"model", checkpoint::state_of(net)}, {"step", &step}});
    for (const at::Tensor& t : net.parameters()) EXPECT_TRUE(t.eq(double(step)).all().item<bool>()) << path;
    EXPECT_EQ(net.count.item<int64_t>(), step) << path;
    return step;
  }

  testing::Folder folder_;
  Board* board_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(On, KilledSaves,
                         ::testing::Values(Way{"numbered", save_numbered}, Way{"over", save_over},
                                           Way{"over_without_exchange", save_over_without_exchange},
                                           Way{"asynchronously", save_asynchronously}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(KilledSaves, LeaveTheLastCheckpointWhole) {
  std::mt19937 random(7);
  for (int kill = 0; kill < 68 && !HasFailure(); ++kill) {
    save_and_kill(1 + kill % 4, int(random() % 15000));
    expect_whole();
  }
  // The next save clears up.
  Net net;
  GetParam().save(folder_.path().string(), {{"model", checkpoint::state_of(net)}, {"step", 0}}, board_->committed + 1);
  expect_nothing_left();
}

// One after the other, so that no moment is left out: each file is written, each is on the disk, each is removed.
TEST_P(KilledSaves, LeaveTheLastCheckpointWholeBehindEachCallOfTheDisk) {
  for (int num_ranks : {1, 2, 3, 4}) {
    for (int i = 0; i < 3; ++i) ASSERT_FALSE(save_and_kill_behind(num_ranks, 0));  // there are old ones to remove
    int num_kills = 0;
    while (save_and_kill_behind(num_ranks, num_kills + 1) && !HasFailure()) {
      ++num_kills;
      expect_whole();
      ASSERT_FALSE(save_and_kill_behind(num_ranks, 0));
      expect_nothing_left();
    }
    // A folder is made, two files get their length, these and two indices are written and synced, the folder and its
    // parent synced, one renamed, four things or five removed.
    EXPECT_GE(num_kills, 18) << num_ranks;
  }
}

// The renames of a save over an older one: it goes aside, the new one comes, the old one gets the name of what goes.
TEST(KilledSavesBetweenRenames, LeaveTheOldOneOrTheNewOne) {
  for (int num_renames = 1; num_renames <= 3; ++num_renames) {
    SCOPED_TRACE(num_renames);
    const testing::Folder folder;
    const auto save = [&](const char* name, int64_t value) {
      save_over_without_exchange(folder / name, {{"value", value}, {"x", at::full({3}, value)}}, 0);
    };
    const auto value_in = [](const std::string& path) { return checkpoint::read_value(path, "value").toInt(); };
    save("a", 1);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      testing::disk_calls().kill_after_renames = num_renames;
      save("a", 2);
      std::_Exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "there are fewer renames";
    const int64_t expected = num_renames == 1 ? 1 : 2;
    EXPECT_EQ(value_in(folder / "a/last"), expected);
    EXPECT_EQ(value_in(checkpoint::latest(folder / "a").value()), expected);
    checkpoint::save(folder / "a/other", {{"value", 3}});
    EXPECT_EQ(value_in(folder / "a/last"), expected);
    std::set<std::string> names;
    for (const auto& item : fs::directory_iterator(folder / "a")) names.insert(item.path().filename().string());
    EXPECT_EQ(names, (std::set<std::string>{"last", "other"}));
  }
}

}  // namespace
}  // namespace serried
