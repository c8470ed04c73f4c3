// The black box, written by groups and read as a launcher reads it.
#include "serried/comm/collectives/black_box.h"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <barrier>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "serried/comm/collectives/async.h"
#include "serried/launch/black_box.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using launch::BlackBox;
using launch::CallSeen;
using launch::GroupSeen;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kSecond = 1'000'000'000;

// The one of this process, whoever has made it.
BlackBox find_box() {
  black_box::file();
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone);
    if (target.starts_with(std::string("/memfd:") + black_box::kFileName))
      return BlackBox::open(entry.path(), ::geteuid());
  }
  return {};
}

const BlackBox& own_box() {
  static const BlackBox box = find_box();
  return box;
}

GroupSeen group_of(const Group& g, int64_t now_ns = 0, int64_t longest_wait_ns = 0) {
  const std::string name = g->getGroupName();
  for (const GroupSeen& group : own_box().groups(now_ns, longest_wait_ns)) {
    if (group.name == name.substr(0, name.find('@')) && group.rank == g->getRank() && !group.closed) return group;
  }
  return {};
}

std::vector<CallSeen> calls_of(const Group& g) {
  const uint64_t id = group_of(g).id;
  std::vector<CallSeen> calls;
  for (CallSeen& call : own_box().calls()) {
    if (call.group == id) calls.push_back(std::move(call));
  }
  return calls;
}

std::vector<std::string> texts_of(const std::vector<CallSeen>& calls) {
  std::vector<std::string> texts;
  for (const CallSeen& call : calls) texts.push_back(call.text.substr(call.text.find(' ') + 1));
  return texts;
}

void expect_done(const CallSeen& call, bool failed = false) {
  EXPECT_GT(call.issued_ns, 0) << call.text;
  EXPECT_GE(call.begun_ns, call.issued_ns) << call.text;
  EXPECT_GE(call.ended_ns, call.begun_ns) << call.text;
  EXPECT_EQ(call.failed, failed) << call.text;
}

class BlackBoxes : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, BlackBoxes, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(BlackBoxes, HoldEveryCallWithItsTimes) {
  on_ranks([](const Group& g) {
    const uint64_t before = group_of(g).newest.sequence;
    barrier(g);
    all_reduce_(torch::ones({5, 3}), g);
    broadcast_(torch::ones({7}, at::kLong), g, {.src = 1});
    const std::vector<CallSeen> calls = calls_of(g);
    ASSERT_GE(calls.size(), 3U);
    const std::vector<CallSeen> last(calls.end() - 3, calls.end());
    EXPECT_THAT(texts_of(last), ElementsAre("barrier", "all_reduce f32[5,3] sum", "broadcast i64[7] from rank 1"));
    for (uint64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(last[i].sequence, before + 1 + i);
      expect_done(last[i]);
    }
    const GroupSeen group = group_of(g);
    EXPECT_EQ(group.world_size, g->getSize());
    EXPECT_EQ(group.newest.sequence, before + 3);
    EXPECT_EQ(group.ended_sequence, before + 3);
    EXPECT_EQ(group.num_issued, group.num_ended);
    EXPECT_EQ(group.newest.text, last[2].text);
  });
}

TEST_P(BlackBoxes, HoldWhatIsCalledByC10dToo) {
  on_ranks([](const Group& g) {
    std::vector<at::Tensor> x{torch::ones({4})};
    g->allreduce(x)->wait();
    const std::vector<CallSeen> calls = calls_of(g);
    ASSERT_FALSE(calls.empty());
    EXPECT_EQ(texts_of({calls.back()})[0], "all_reduce f32[4] sum");
    expect_done(calls.back());
  });
}

TEST_P(BlackBoxes, HoldSendsAndReceivesWithoutANumber) {
  on_ranks([](const Group& g) {
    if (g->getRank() == 0) send(torch::ones({3}), g, {.peer = 1});
    if (g->getRank() == 1) recv(torch::ones({3}), g, {.peer = 0});
    const std::vector<CallSeen> calls = calls_of(g);
    if (g->getRank() > 1) return;
    ASSERT_FALSE(calls.empty());
    EXPECT_EQ(calls.back().text, g->getRank() == 0 ? "send f32[3] to rank 1" : "recv f32[3] from rank 0");
    EXPECT_EQ(calls.back().sequence, 0U);
    EXPECT_GT(calls.back().begun_ns, 0);
    EXPECT_GT(calls.back().ended_ns, 0);
  });
}

// As a launcher sees them ten seconds from now.
std::vector<CallSeen> open_of_rank_0(const Group& g) {
  const std::string name = g->getGroupName();
  for (const GroupSeen& group : own_box().groups(launch::monotonic_ns() + 10 * kSecond, 5 * kSecond)) {
    if (group.name == name.substr(0, name.find('@')) && group.rank == 0 && !group.closed) return group.open;
  }
  return {};
}

// Ranks that can hold each other back.
class BlackBoxesOfThreads : public ::testing::TestWithParam<const char*> {
 protected:
  static void on_ranks(int num_ranks, const std::function<void(const Group&)>& fn) {
    run_ranks(num_ranks, fn, {.backend = GetParam()});
  }
};

INSTANTIATE_TEST_SUITE_P(On, BlackBoxesOfThreads, ::testing::Values("shm", "gloo", "threads"));

TEST_P(BlackBoxesOfThreads, ShowWhoHasComeAndWhoHasNot) {
  std::barrier started(3), looked(3);
  on_ranks(3, [&](const Group& g) {
    const uint64_t next = group_of(g).newest.sequence + 1;
    const bool comes = g->getRank() != 1;
    std::optional<Pending> sum;
    if (comes) sum = async::all_reduce(torch::ones({5}), g);
    started.arrive_and_wait();
    // A launcher that looks ten seconds from now sees it wait for longer than five.
    const GroupSeen group = group_of(g, launch::monotonic_ns() + 10 * kSecond, 5 * kSecond);
    looked.arrive_and_wait();
    if (comes) {
      EXPECT_EQ(group.num_issued, group.num_ended + 1);
      EXPECT_LT(group.ended_sequence, next);
      ASSERT_THAT(group.open, SizeIs(1));
      EXPECT_EQ(group.open[0].text, "#" + std::to_string(next) + " all_reduce f32[5] sum");
    } else {
      EXPECT_EQ(group.newest.sequence, next - 1);
      EXPECT_THAT(group.open, SizeIs(0));
      sum = async::all_reduce(torch::ones({5}), g);
    }
    sum->wait();
    expect_done(calls_of(g).back());
  });
}

TEST_P(BlackBoxesOfThreads, ShowWhoWaitsForAMessage) {
  bool seen = false;
  on_ranks(2, [&](const Group& g) {
    if (g->getRank() == 0) {
      recv(torch::ones({3}), g, {.peer = 1});
      return;
    }
    std::vector<CallSeen> open;
    while (open.empty()) open = open_of_rank_0(g);
    EXPECT_EQ(open[0].text, "recv f32[3] from rank 1");
    seen = true;
    send(torch::ones({3}), g, {.peer = 0});
  });
  EXPECT_TRUE(seen);
}

TEST(BlackBox, SaysThatACallHasFailed) {
  run_ranks(2,
            [](const Group& g) {
              const at::Tensor x = torch::ones({g->getRank() + 1});
              EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { all_reduce_(x, g); }), HasSubstr("rank 0"));
              const std::vector<CallSeen> calls = calls_of(g);
              ASSERT_THAT(calls, SizeIs(1));
              EXPECT_EQ(calls[0].text, g->getRank() == 0 ? "#1 all_reduce f32[1] sum" : "#1 all_reduce f32[2] sum");
              expect_done(calls[0], /*failed=*/true);
            },
            {.backend = "shm"});
}

watch::Record record_of(int64_t num_elements) {
  return watch::make_record(watch::Kind::all_reduce, torch::ones({num_elements}));
}

TEST(BlackBox, KeepsTheNewestCallsAndTheNewestOfEachGroup) {
  black_box::GroupLog quiet, busy;
  quiet.open("black/box/quiet", 0, 1);
  busy.open("black/box/busy", 2, 3);
  const black_box::CallLog rare = quiet.issue(record_of(7));
  rare.begin(1);
  for (uint64_t i = 1; i <= black_box::kNumEntries + 10; ++i) {
    const black_box::CallLog call = busy.issue(record_of(1));
    call.begin(i);
    call.end(i % 2 == 0);
  }
  const BlackBox& box = own_box();
  const std::vector<CallSeen> calls = box.calls();
  EXPECT_THAT(calls, SizeIs(black_box::kNumEntries));
  EXPECT_EQ(calls.back().sequence, black_box::kNumEntries + 10);
  EXPECT_TRUE(calls.back().failed);
  EXPECT_GE(box.num_calls(), black_box::kNumEntries + 11);
  int found = 0;
  for (const GroupSeen& group : box.groups(0, 0)) {
    if (group.name == "black/box/quiet") {
      EXPECT_EQ(group.newest.text, "#1 all_reduce f32[7]");
      ++found;
    }
    if (group.name == "black/box/busy") {
      EXPECT_EQ(group.rank, 2);
      EXPECT_EQ(group.ended_sequence, black_box::kNumEntries + 10);
      ++found;
    }
  }
  EXPECT_EQ(found, 2);
  rare.end(false);  // its entry is another call's by now
  EXPECT_EQ(box.calls().back().sequence, black_box::kNumEntries + 10);
  quiet.close();
  busy.close();
}

TEST(BlackBox, GivesTheSlotOfTheOldestClosedGroupAway) {
  std::vector<std::unique_ptr<black_box::GroupLog>> open;
  for (uint32_t i = 0; i < black_box::kNumGroups + 3; ++i) {
    open.push_back(std::make_unique<black_box::GroupLog>());
    open.back()->open("slots/x/" + std::to_string(i), 0, 1);
    open.back()->issue(record_of(1)).end(false);
    open.back()->close();
  }
  std::vector<std::string> names;
  for (const GroupSeen& group : own_box().groups(0, 0)) names.push_back(group.name);
  EXPECT_THAT(names, SizeIs(black_box::kNumGroups));
  EXPECT_THAT(names, ::testing::Contains("slots/x/" + std::to_string(black_box::kNumGroups + 2)));
  EXPECT_THAT(names, ::testing::Not(::testing::Contains("slots/x/1")));
}

}  // namespace
}  // namespace serried
