// What ranks see of each other: who is where, who disagrees, who is gone.
#include "serried/comm/agree/group_status.h"

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/support/two_hosts.h"

namespace serried::detail {
namespace {

using namespace std::chrono_literals;
using serried::testing::TwoHosts;
using ::testing::HasSubstr;
using watch::Kind;
using watch::Record;
using Statuses = std::vector<std::unique_ptr<GroupStatus>>;

Record call(uint64_t sequence, at::IntArrayRef sizes) {
  Record record = watch::make_record(Kind::all_reduce, torch::zeros(sizes), -1, c10d::ReduceOp::SUM);
  record.sequence = sequence;
  return record;
}

bool enter(GroupStatus& status, const Record& record) {
  return status.enter(record, watch::fingerprint(record));
}

// The statuses of all ranks, made as ranks make them: at once.
Statuses make_statuses(int num_ranks, const c10::intrusive_ptr<c10d::Store>& store) {
  Statuses statuses(num_ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] { statuses[r] = std::make_unique<GroupStatus>(store, r, num_ranks, 10s); });
  }
  for (auto& thread : threads) thread.join();
  return statuses;
}

Statuses make_statuses(int num_ranks) {
  return make_statuses(num_ranks, c10::make_intrusive<c10d::HashStore>());
}

TEST(GroupStatus, RanksOfOneHostShareIt) {
  const Statuses statuses = make_statuses(3);
  for (const auto& status : statuses) {
    EXPECT_TRUE(status->one_host());
    EXPECT_TRUE(status->is_shared());
    EXPECT_FALSE(status->failed());
  }
}

TEST(GroupStatus, EqualCallsAgree) {
  const Statuses statuses = make_statuses(3);
  for (uint64_t sequence = 1; sequence < 200; ++sequence) {
    for (const auto& status : statuses) ASSERT_TRUE(enter(*status, call(sequence, {int64_t(sequence), 2})));
  }
  EXPECT_EQ(watch::describe(statuses[0]->newest(2)), "#199 all_reduce f32[199,2] sum");
}

TEST(GroupStatus, TheLastToComeSeesTheMismatchAndAllLearnOfIt) {
  const Statuses statuses = make_statuses(3);
  EXPECT_TRUE(enter(*statuses[2], call(1, {3})));
  EXPECT_TRUE(enter(*statuses[1], call(1, {3})));
  EXPECT_FALSE(enter(*statuses[0], call(1, {4})));
  for (const auto& status : statuses) {
    ASSERT_TRUE(status->failed());
    EXPECT_EQ(status->failure().what,
              "ranks called different collectives: rank 0 #1 all_reduce f32[4] sum, rank 1 #1 all_reduce f32[3] sum");
  }
}

TEST(GroupStatus, OfTwoRanksThatEnterAtOnceOneSeesTheOther) {
  const Statuses statuses = make_statuses(2);
  for (uint64_t sequence = 1; sequence <= 2000; ++sequence) {
    const bool differ = sequence == 2000;
    std::atomic<int> ready{0};
    bool agreed[2];
    const auto race = [&](int rank) {
      const Record record = call(sequence, {differ ? rank + 1 : 1});
      ready.fetch_add(1);
      while (ready.load() < 2) {
      }
      agreed[rank] = enter(*statuses[rank], record);
    };
    if (sequence % 100 != 0) {
      for (const auto& status : statuses) enter(*status, call(sequence, {1}));
      continue;
    }
    std::thread other(race, 1);
    race(0);
    other.join();
    EXPECT_EQ(agreed[0] && agreed[1], !differ);
  }
}

TEST(GroupStatus, ARankFarAheadIsNotComparedWithWhatItsRingHasLost) {
  const Statuses statuses = make_statuses(2);
  for (uint64_t sequence = 1; sequence <= 100; ++sequence) EXPECT_TRUE(enter(*statuses[0], call(sequence, {7})));
  EXPECT_TRUE(enter(*statuses[1], call(1, {5})));
  EXPECT_FALSE(enter(*statuses[1], call(50, {5})));
}

TEST(GroupStatus, ACallThatNeverStartedIsForgotten) {
  const Statuses statuses = make_statuses(2);
  EXPECT_TRUE(enter(*statuses[0], call(1, {3})));
  statuses[0]->leave(1);
  EXPECT_TRUE(enter(*statuses[1], call(1, {5})));
  EXPECT_TRUE(enter(*statuses[0], call(1, {5})));
}

TEST(GroupStatus, TheFirstFailureStays) {
  const Statuses statuses = make_statuses(2);
  statuses[1]->fail({"first", "fix it"});
  statuses[0]->fail({"second", ""});
  EXPECT_EQ(statuses[0]->failure().what, "first");
  EXPECT_EQ(statuses[0]->failure().fix, "fix it");
}

TEST(GroupStatus, LongFailuresAreCutNotLost) {
  const Statuses statuses = make_statuses(2);
  statuses[1]->fail({std::string(5000, 'x'), std::string(5000, 'y')});
  EXPECT_EQ(statuses[0]->failure().what, std::string(1535, 'x'));
}

TEST(GroupStatus, SaysWhoIsMissingAndWhoHasLeft) {
  Statuses statuses = make_statuses(3);
  enter(*statuses[0], call(1, {3}));
  enter(*statuses[1], call(1, {3}));
  enter(*statuses[0], call(2, {4}));
  statuses[2].reset();
  EXPECT_EQ(statuses[0]->missing_text(call(2, {4}), 70),
            "timed out after 70 ms in #2 all_reduce f32[4] sum: rank 2 has not made any call, "
            "rank 1 is at #1 all_reduce f32[3] sum, rank 0 at #2; rank 2 has left the group");
}

TEST(GroupStatus, NamesRanksThatNeverCome) {
  try {
    GroupStatus status(c10::make_intrusive<c10d::HashStore>(), 0, 3, 50ms);
    FAIL() << "no error";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[new_group] ranks 1, 2 of 3 did not come within 50 ms"));
  }
}

TEST(GroupStatus, SeesThatAProcessHasEnded) {
  const auto path = std::filesystem::temp_directory_path() / ("serried_status_" + std::to_string(getpid()));
  const pid_t child = fork();
  if (child == 0) {
    GroupStatus status(c10::make_intrusive<c10d::FileStore>(path.string(), 2), 1, 2, 10s);
    enter(status, call(1, {3}));
    _exit(status.is_shared() ? 0 : 1);  // as if killed: no destructor runs
  }
  GroupStatus status(c10::make_intrusive<c10d::FileStore>(path.string(), 2), 0, 2, 10s);
  int ended = -1;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(status.gone_text(), "; the process of rank 1 has ended");
  EXPECT_EQ(watch::describe(status.newest(1)), "#1 all_reduce f32[3] sum");
  EXPECT_FALSE(enter(status, call(1, {4})));
  std::filesystem::remove(path);
}

TEST(GroupStatus, AcrossHostsRanksMeetInTheStoreWhenTheyReport) {
  const Statuses statuses = make_statuses(2, c10::make_intrusive<TwoHosts>());
  for (const auto& status : statuses) EXPECT_FALSE(status->one_host() || status->is_shared());
  EXPECT_TRUE(enter(*statuses[0], call(1, {3})));
  EXPECT_TRUE(enter(*statuses[1], call(1, {4})));
  std::string texts[2];
  std::thread other([&] { texts[1] = statuses[1]->missing_text(call(1, {4}), 60); });
  texts[0] = statuses[0]->missing_text(call(1, {3}), 60);
  other.join();
  for (const auto& text : texts) {
    EXPECT_EQ(text,
              "ranks called different collectives: rank 0 #1 all_reduce f32[3] sum, rank 1 #1 all_reduce f32[4] sum");
  }
}

TEST(GroupStatus, AcrossHostsARankThatDoesNotReportIsNamed) {
  const Statuses statuses = make_statuses(2, c10::make_intrusive<TwoHosts>());
  EXPECT_EQ(statuses[0]->missing_text(call(1, {3}), 60),
            "timed out after 60 ms in #1 all_reduce f32[3] sum: rank 1 did not report and is likely not in a call of "
            "this group, rank 0 is at #1 all_reduce f32[3] sum");
}

TEST(GroupStatus, LeavesNoFileOpen) {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = count();
  { const Statuses statuses = make_statuses(3); }
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace serried::detail
