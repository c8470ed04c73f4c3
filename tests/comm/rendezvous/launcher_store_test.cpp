// The store that the launcher keeps, from the rank's side: errors, threads, programs that follow each other, tables.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <future>
#include <thread>

#include "serried/comm/rendezvous/launcher_store.h"
#include "serried/comm/rendezvous/world_store.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/launcher_stand_in.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using detail::LauncherLine;
using detail::LauncherStore;
using ::testing::AllOf;
using ::testing::HasSubstr;

class LauncherStores : public ::testing::Test {
 protected:
  c10::intrusive_ptr<LauncherStore> open(int rank) {
    return c10::make_intrusive<LauncherStore>(std::make_shared<LauncherLine>(launcher_.take_end(rank)), "127.0.0.1");
  }

  testing::LauncherStandIn launcher_{3};
};

template <class Fn>
std::string what_of(const Fn& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return "no error";
}

TEST_F(LauncherStores, RanksHearOfEachOther) {
  const auto zero = open(0), one = open(1);
  std::thread setter([&] { one->set("late", "here"); });
  EXPECT_EQ(zero->get_to_str("late"), "here");
  setter.join();
  EXPECT_EQ(zero->add("n", 2), 2);
  EXPECT_EQ(one->add("n", 3), 5);
  EXPECT_EQ(one->listKeys(), (std::vector<std::string>{"late", "n"}));
  EXPECT_EQ(detail::place_of(zero), "serried run");
}

TEST_F(LauncherStores, KeysThatDoNotComeAreNamed) {
  const auto store = open(0);
  store->setTimeout(20ms);
  EXPECT_THAT(what_of([&] { store->get("a"); }),
              AllOf(HasSubstr("[store] the key \"a\" did not come to the store of serried run within 20 ms"),
                    HasSubstr("fix: look at what the rank that writes it is doing")));
  EXPECT_THAT(what_of([&] {
                store->wait({"a", "b", "c", "d", "e"}, 10ms);
              }),
              HasSubstr("the keys \"a\", \"b\", \"c\" and 2 more did not come"));
  EXPECT_THROW(store->wait({"a"}, 10ms), c10::DistStoreError);
  // What was asked too late is not kept from those who ask later.
  store->setTimeout(20s);
  store->queuePush("q", {1});
  EXPECT_EQ(store->queuePop("q", true), std::vector<uint8_t>{1});
  EXPECT_THROW(store->queuePop("q", false), c10::DistQueueEmptyError);
}

TEST_F(LauncherStores, APopThatCameTooLateTakesNothing) {
  const auto store = open(0), other = open(1);
  store->setTimeout(10ms);
  EXPECT_THROW(store->queuePop("q", true), c10::DistStoreError);
  other->queuePush("q", {7});
  EXPECT_EQ(other->queueLen("q"), 1);
}

TEST_F(LauncherStores, ValuesThatAreTooLongAreRefusedAndTheLineGoesOn) {
  const auto store = open(0);
  EXPECT_THAT(
      what_of([&] { store->set("big", std::vector<uint8_t>(9 << 20)); }),
      AllOf(HasSubstr("[store] the store of serried run takes at most 8388608 bytes at once, and the key \"big\" "
                      "would bring 94371"),
            HasSubstr("fix: send data through a group, or a file")));
  EXPECT_FALSE(store->check({"big"}));
  const std::vector<uint8_t> fits(7 << 20, 3);
  store->set("fits", fits);
  EXPECT_EQ(store->get("fits"), fits);
  EXPECT_THAT(what_of([&] { store->append("fits", std::vector<uint8_t>(2 << 20)); }),
              HasSubstr("takes no more: the value of \"fits\" would be longer than 8 MiB"));
  store->set("second", fits);
  EXPECT_THAT(what_of([&] { store->multiGet({"fits", "second"}); }), HasSubstr("too long to send"));
}

TEST_F(LauncherStores, ManyThreadsShareOneLine) {
  const auto store = open(0), other = open(1);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const auto mine = thread % 2 == 0 ? store->clone() : other->clone();
      for (int i = 0; i < 50; ++i) {
        mine->add("sum", 1);
        mine->set(c10::str(thread, "/", i), c10::str(i));
        EXPECT_EQ(mine->get_to_str(c10::str((thread + 1) % 4, "/", i)), c10::str(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->add("sum", 0), 200);
}

TEST_F(LauncherStores, AProgramThatFollowsAnotherFindsNothingOfIt) {
  open(0)->set("a", "first");
  const auto second = open(0);
  EXPECT_FALSE(second->check({"a"}));
  second->set("a", "second");
  EXPECT_EQ(open(1)->get_to_str("a"), "first");
  EXPECT_EQ(open(1)->get_to_str("a"), "second");
}

TEST_F(LauncherStores, WhoWaitsIsToldThatTheLauncherHasEnded) {
  const auto store = open(0);
  std::future<std::string> waiting = std::async(std::launch::async, [&] { return what_of([&] { store->get("a"); }); });
  launcher_.end();
  EXPECT_THAT(waiting.get(), HasSubstr("[store] the launcher, serried run, which keeps the store, has ended"));
  EXPECT_THROW(store->set("a", "1"), c10::DistNetworkError);
}

TEST_F(LauncherStores, WaitsThatAreEndedRaiseAndLeaveTheLineToOthers) {
  const auto store = open(0);
  const auto same = store->clone();
  const auto other = c10::make_intrusive<LauncherStore>(std::make_shared<LauncherLine>(launcher_.take_end(1)), "");
  std::vector<std::future<std::string>> waiting;
  for (const auto& one : {c10::intrusive_ptr<c10d::Store>(store), same}) {
    waiting.push_back(std::async(std::launch::async, [one] { return what_of([&] { one->get("a"); }); }));
  }
  store->end_waits();
  for (auto& one : waiting) {
    EXPECT_THAT(one.get(), HasSubstr("[store] the key \"a\" belongs to ranks that are others by now\n  fix: make the "
                                     "groups anew with the ranks that there are: see serried::Elastic"));
  }
  EXPECT_THROW(same->set("a", "1"), c10::DistStoreError);
  other->set("a", "1");
  EXPECT_EQ(other->get_to_str("a"), "1");
}

TEST_F(LauncherStores, AForkedChildMayNotAsk) {
  const auto store = open(0);
  const pid_t child = fork();
  if (child == 0) _exit(what_of([&] { store->set("a", "1"); }).find("is a fork of process") == std::string::npos);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(store->check({"a"}));
}

TEST(LauncherLine, AVariableThatNamesNoSocketIsRefused) {
  for (const char* fd : {"0", "9999", "-1"}) {
    const testing::ScopedEnv env{{"SERRIED_LAUNCHER_FD", fd}};
    EXPECT_THAT(
        what_of([] { LauncherLine::of_process(); }),
        AllOf(HasSubstr(c10::str("[rendezvous] SERRIED_LAUNCHER_FD is ", fd, ", and this process has no socket")),
              HasSubstr("fix: let the program inherit them")));
  }
}

struct Line {
  Line() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    launcher = launch::Fd(ends[0]);
    line = std::make_shared<LauncherLine>(ends[1]);
  }
  void say(const channel::Message& message) const {
    const std::string bytes = channel::encode(message);
    EXPECT_EQ(::send(launcher.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  launch::Fd launcher;
  std::shared_ptr<LauncherLine> line;
};

TEST(LauncherLine, TablesComeInOrderAndTheNewestCounts) {
  const Line ends;
  EXPECT_FALSE(ends.line->newest_table());
  EXPECT_FALSE(ends.line->wait_for_table(0, LauncherLine::Clock::now() + 5ms));
  ends.say({"table", "1", "2", "3", "0", "1", "2", "3"});
  ends.say({"table", "2", "1", "2", "0", "1", "1", "2"});
  const auto table = ends.line->wait_for_table(1, LauncherLine::Clock::time_point::max());
  ASSERT_TRUE(table);
  EXPECT_EQ(table->generation, 2);
  EXPECT_EQ(table->rank, 1);
  EXPECT_EQ(table->world_size, 2);
  EXPECT_EQ(table->local_world_size, 1);
  EXPECT_EQ(table->node_rank, 1);
  EXPECT_EQ(table->num_nodes, 2);
  EXPECT_EQ(ends.line->newest_table()->generation, 2);
}

TEST(LauncherLine, WhoAsksWhileTheLeaderIsAwayIsToldItsAddress) {
  const Line ends;
  ends.say({"leader", "h0:29500"});
  ends.say({"table", "1", "0", "2", "0", "1", "0", "2"});  // behind it: both have been heard
  ASSERT_TRUE(ends.line->wait_for_table(0, LauncherLine::Clock::time_point::max()));
  const auto store = c10::make_intrusive<LauncherStore>(ends.line, "127.0.0.1");
  store->setTimeout(20ms);
  EXPECT_THAT(
      what_of([&] { store->get("a"); }),
      HasSubstr("[store] the key \"a\": no answer within 20 ms, since the leader of the job at h0:29500, which "
                "keeps the store, is lost, and no other has taken its place\n  fix: start the launcher that led "
                "the job there again, with the same command line"));
  ends.say({"leader", ""});
  ends.say({"table", "2", "0", "2", "0", "1", "0", "2"});
  ASSERT_TRUE(ends.line->wait_for_table(1, LauncherLine::Clock::time_point::max()));
  EXPECT_THAT(what_of([&] { store->get("a"); }), HasSubstr("did not come to the store of serried run"));
}

TEST(LauncherLine, WhatIsOverIsToldToWhoListensNowAndLater) {
  const Line ends;
  std::promise<int> told;
  ends.line->on_over([&](const detail::Over& over) { told.set_value(over.generation); });
  ends.say({"over", "4", "rank 1 was killed"});
  EXPECT_EQ(told.get_future().get(), 4);
  std::string why;
  ends.line->on_over([&](const detail::Over& over) { why = over.why; });
  EXPECT_EQ(why, "rank 1 was killed");
  ends.line->on_over({});
  EXPECT_EQ(ends.line->newest_over()->generation, 4);
}

TEST(LauncherLine, TablesAreToldToWhoListens) {
  const Line ends;
  ends.say({"table", "1", "2", "3", "0", "1", "2", "3"});
  ASSERT_TRUE(ends.line->wait_for_table(0, LauncherLine::Clock::time_point::max()));
  int last = 0;
  std::promise<int> told;
  ends.line->on_table([&](const detail::RankTable& table) {
    last = table.generation;
    if (last == 2) told.set_value(last);
  });
  EXPECT_EQ(last, 1);
  ends.say({"table", "2", "1", "2", "0", "1", "1", "2"});
  EXPECT_EQ(told.get_future().get(), 2);
  ends.line->on_table({});
}

TEST(LauncherLine, WhoWaitsForATableIsToldThatTheLauncherHasEnded) {
  Line ends;
  ends.launcher.reset();
  EXPECT_THROW(ends.line->wait_for_table(0, LauncherLine::Clock::time_point::max()), c10::DistNetworkError);
}

TEST(LauncherLine, BytesThatAreNoMessageCloseIt) {
  const Line ends;
  EXPECT_EQ(::send(ends.launcher.get(), "HTTP/1.1 400", 12, 0), 12);
  EXPECT_THROW(ends.line->wait_for_table(0, LauncherLine::Clock::time_point::max()), c10::DistNetworkError);
}

}  // namespace
}  // namespace serried
