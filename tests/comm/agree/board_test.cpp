// The shared page: who is where, who disagrees, who is gone.
#include "serried/comm/agree/board.h"

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
using Boards = std::vector<std::unique_ptr<Board>>;

Record call(uint64_t sequence, at::IntArrayRef sizes) {
  Record record = watch::make_record(Kind::all_reduce, torch::zeros(sizes), -1, c10d::ReduceOp::SUM);
  record.sequence = sequence;
  return record;
}

bool enter(Board& board, const Record& record) {
  return board.enter(record, watch::fingerprint(record));
}

// The boards of all ranks, made as ranks make them: at once.
Boards make_boards(int num_ranks, const c10::intrusive_ptr<c10d::Store>& store) {
  Boards boards(num_ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] { boards[r] = std::make_unique<Board>(store, r, num_ranks, 10s); });
  }
  for (auto& thread : threads) thread.join();
  return boards;
}

Boards make_boards(int num_ranks) {
  return make_boards(num_ranks, c10::make_intrusive<c10d::HashStore>());
}

TEST(Board, RanksOfOneHostShareIt) {
  const Boards boards = make_boards(3);
  for (const auto& board : boards) {
    EXPECT_TRUE(board->one_host());
    EXPECT_TRUE(board->shared());
    EXPECT_FALSE(board->failed());
  }
}

TEST(Board, EqualCallsAgree) {
  const Boards boards = make_boards(3);
  for (uint64_t sequence = 1; sequence < 200; ++sequence) {
    for (const auto& board : boards) ASSERT_TRUE(enter(*board, call(sequence, {int64_t(sequence), 2})));
  }
  EXPECT_EQ(watch::describe(boards[0]->newest(2)), "#199 all_reduce f32[199,2] sum");
}

TEST(Board, TheLastToComeSeesTheMismatchAndAllLearnOfIt) {
  const Boards boards = make_boards(3);
  EXPECT_TRUE(enter(*boards[2], call(1, {3})));
  EXPECT_TRUE(enter(*boards[1], call(1, {3})));
  EXPECT_FALSE(enter(*boards[0], call(1, {4})));
  for (const auto& board : boards) {
    ASSERT_TRUE(board->failed());
    EXPECT_EQ(board->failure().what,
              "ranks called different collectives: rank 0 #1 all_reduce f32[4] sum, rank 1 #1 all_reduce f32[3] sum");
  }
}

TEST(Board, OfTwoRanksThatEnterAtOnceOneSeesTheOther) {
  const Boards boards = make_boards(2);
  for (uint64_t sequence = 1; sequence <= 2000; ++sequence) {
    const bool differ = sequence == 2000;
    std::atomic<int> ready{0};
    bool agreed[2];
    const auto race = [&](int rank) {
      const Record record = call(sequence, {differ ? rank + 1 : 1});
      ready.fetch_add(1);
      while (ready.load() < 2) {
      }
      agreed[rank] = enter(*boards[rank], record);
    };
    if (sequence % 100 != 0) {
      for (const auto& board : boards) enter(*board, call(sequence, {1}));
      continue;
    }
    std::thread other(race, 1);
    race(0);
    other.join();
    EXPECT_EQ(agreed[0] && agreed[1], !differ);
  }
}

TEST(Board, ARankFarAheadIsNotComparedWithWhatItsRingHasLost) {
  const Boards boards = make_boards(2);
  for (uint64_t sequence = 1; sequence <= 100; ++sequence) EXPECT_TRUE(enter(*boards[0], call(sequence, {7})));
  EXPECT_TRUE(enter(*boards[1], call(1, {5})));
  EXPECT_FALSE(enter(*boards[1], call(50, {5})));
}

TEST(Board, ACallThatNeverStartedIsForgotten) {
  const Boards boards = make_boards(2);
  EXPECT_TRUE(enter(*boards[0], call(1, {3})));
  boards[0]->leave(1);
  EXPECT_TRUE(enter(*boards[1], call(1, {5})));
  EXPECT_TRUE(enter(*boards[0], call(1, {5})));
}

TEST(Board, TheFirstFailureStays) {
  const Boards boards = make_boards(2);
  boards[1]->fail({"first", "fix it"});
  boards[0]->fail({"second", ""});
  EXPECT_EQ(boards[0]->failure().what, "first");
  EXPECT_EQ(boards[0]->failure().fix, "fix it");
}

TEST(Board, LongFailuresAreCutNotLost) {
  const Boards boards = make_boards(2);
  boards[1]->fail({std::string(5000, 'x'), std::string(5000, 'y')});
  EXPECT_EQ(boards[0]->failure().what, std::string(1535, 'x'));
}

TEST(Board, SaysWhoIsMissingAndWhoHasLeft) {
  Boards boards = make_boards(3);
  enter(*boards[0], call(1, {3}));
  enter(*boards[1], call(1, {3}));
  enter(*boards[0], call(2, {4}));
  boards[2].reset();
  EXPECT_EQ(boards[0]->missing_text(call(2, {4}), 70),
            "timed out after 70 ms in #2 all_reduce f32[4] sum: rank 2 has not made any call, "
            "rank 1 is at #1 all_reduce f32[3] sum, rank 0 at #2; rank 2 has left the group");
}

TEST(Board, NamesRanksThatNeverCome) {
  try {
    Board board(c10::make_intrusive<c10d::HashStore>(), 0, 3, 50ms);
    FAIL() << "no error";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("[new_group] timed out after 50 ms: ranks 1, 2 of 3 did not come to this group"));
  }
}

TEST(Board, SeesThatAProcessHasEnded) {
  const auto path = std::filesystem::temp_directory_path() / ("serried_board_" + std::to_string(getpid()));
  const pid_t child = fork();
  if (child == 0) {
    Board board(c10::make_intrusive<c10d::FileStore>(path.string(), 2), 1, 2, 10s);
    enter(board, call(1, {3}));
    _exit(board.shared() ? 0 : 1);  // as if killed: no destructor runs
  }
  Board board(c10::make_intrusive<c10d::FileStore>(path.string(), 2), 0, 2, 10s);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(board.gone_text(), "; the process of rank 1 has ended");
  EXPECT_EQ(watch::describe(board.newest(1)), "#1 all_reduce f32[3] sum");
  EXPECT_FALSE(enter(board, call(1, {4})));
  std::filesystem::remove(path);
}

TEST(Board, AcrossHostsRanksMeetInTheStoreWhenTheyReport) {
  const Boards boards = make_boards(2, c10::make_intrusive<TwoHosts>());
  for (const auto& board : boards) EXPECT_FALSE(board->one_host() || board->shared());
  EXPECT_TRUE(enter(*boards[0], call(1, {3})));
  EXPECT_TRUE(enter(*boards[1], call(1, {4})));
  std::string texts[2];
  std::thread other([&] { texts[1] = boards[1]->missing_text(call(1, {4}), 60); });
  texts[0] = boards[0]->missing_text(call(1, {3}), 60);
  other.join();
  for (const auto& text : texts) {
    EXPECT_EQ(text,
              "ranks called different collectives: rank 0 #1 all_reduce f32[3] sum, rank 1 #1 all_reduce f32[4] sum");
  }
}

TEST(Board, AcrossHostsARankThatDoesNotReportIsNamed) {
  const Boards boards = make_boards(2, c10::make_intrusive<TwoHosts>());
  EXPECT_EQ(boards[0]->missing_text(call(1, {3}), 60),
            "timed out after 60 ms in #1 all_reduce f32[3] sum: rank 1 did not report and is likely not in a call of "
            "this group, rank 0 is at #1 all_reduce f32[3] sum");
}

TEST(Board, LeavesNoFileOpen) {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = count();
  { const Boards boards = make_boards(3); }
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace serried::detail
