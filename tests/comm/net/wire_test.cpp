// What every wire does, whatever is behind it.
#include "serried/comm/net/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <poll.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/net/load_ucx.h"
#include "serried/comm/net/make_wire.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/wires.h"

namespace serried::testing {
namespace {

using net::Transfer;
using net::Wire;
using ::testing::HasSubstr;
using ::testing::Not;
using State = net::Transfer::State;

std::string message(size_t size, int seed) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = char((i * 131 + size_t(seed) * 7919 + (i >> 8)) & 0xff);
  return text;
}

/// A receive and the memory for it.
struct Landing {
  explicit Landing(size_t size) : memory(size, '.') {}
  void post(Wire& wire, int peer, uint64_t tag) { wire.receive(transfer, peer, tag, memory.data(), memory.size()); }
  std::string text() const { return memory.substr(0, transfer.bytes); }
  ~Landing() { EXPECT_TRUE(transfer.ended()) << "the wire would write into what is gone"; }

  Transfer transfer = {};
  std::string memory;
};

struct Parcel {
  explicit Parcel(std::string bytes) : memory(std::move(bytes)) {}
  void post(Wire& wire, int peer, uint64_t tag) { wire.send(transfer, peer, tag, memory.data(), memory.size()); }
  ~Parcel() { EXPECT_TRUE(transfer.ended()) << "the wire would write into what is gone"; }

  Transfer transfer = {};
  std::string memory;
};

/// One message over and back, so that what was sent before has arrived.
void meet(const Wires& wires, int a, int b) {
  constexpr uint64_t kMeet = (uint64_t(1) << net::kTagBits) - 1;
  Parcel there("x"), back("y");
  Landing here(1), at_home(1);
  here.post(*wires[size_t(b)], a, kMeet);
  at_home.post(*wires[size_t(a)], b, kMeet);
  there.post(*wires[size_t(a)], b, kMeet);
  ASSERT_TRUE(finish(wires, {&here.transfer, &there.transfer}));
  back.post(*wires[size_t(b)], a, kMeet);
  ASSERT_TRUE(finish(wires, {&at_home.transfer, &back.transfer}));
  ASSERT_EQ(at_home.text(), "y") << at_home.transfer.error;
}

class WireTest : public ::testing::TestWithParam<const char*> {
 protected:
  static Wires make(int size) { return make_wires(GetParam(), size); }
};

TEST_P(WireTest, HasItsName) {
  EXPECT_STREQ(make(2)[0]->name(), GetParam());
}

TEST_P(WireTest, KeepsTheOrderOfATag) {
  const Wires wires = make(2);
  std::list<Parcel> sent;
  std::list<Landing> received;
  std::vector<const Transfer*> all;
  for (int i = 0; i < 20; ++i) {
    if (i % 2 == 0) received.emplace_back(4000).post(*wires[1], 0, 7);
    sent.emplace_back(message(size_t(1 + i * 37), i)).post(*wires[0], 1, 7);
    if (i % 2 == 1) received.emplace_back(4000).post(*wires[1], 0, 7);
  }
  for (const Parcel& parcel : sent) all.push_back(&parcel.transfer);
  for (const Landing& landing : received) all.push_back(&landing.transfer);
  ASSERT_TRUE(finish(wires, all));
  auto expected = sent.begin();
  for (const Landing& landing : received) EXPECT_EQ(landing.text(), (expected++)->memory);
}

TEST_P(WireTest, MatchesTagsWhateverTheirOrder) {
  const Wires wires = make(2);
  Landing late(10), early(10);
  late.post(*wires[1], 0, (uint64_t(1) << 47) | 2);
  early.post(*wires[1], 0, 2);
  Parcel first("first"), second("second");
  first.post(*wires[0], 1, 2);
  second.post(*wires[0], 1, (uint64_t(1) << 47) | 2);
  ASSERT_TRUE(finish(wires, {&late.transfer, &early.transfer, &first.transfer, &second.transfer}));
  EXPECT_EQ(early.text(), "first");
  EXPECT_EQ(late.text(), "second");
  EXPECT_EQ(late.transfer.peer, 0);
}

TEST_P(WireTest, KeepsMessagesThatCameBeforeTheirReceive) {
  const Wires wires = make(2);
  Parcel small("small"), large(message(200000, 1));
  large.post(*wires[0], 1, 1);
  small.post(*wires[0], 1, 2);
  meet(wires, 0, 1);
  Landing first(5), second(200000);
  first.post(*wires[1], 0, 2);
  second.post(*wires[1], 0, 1);
  ASSERT_TRUE(finish(wires, {&first.transfer, &second.transfer, &small.transfer, &large.transfer}));
  EXPECT_EQ(first.text(), "small");
  EXPECT_EQ(second.text() == large.memory, true);
}

TEST_P(WireTest, MovesMessagesOfAllSizes) {
  const Wires wires = make(2);
  for (const size_t size : {0, 1, 1000, 8191, 256 << 10, (256 << 10) + 1, 1 << 20}) {
    Parcel there(message(size, 1)), back(message(size, 2));
    Landing here(size), at_home(size);
    here.post(*wires[1], 0, 5);
    there.post(*wires[0], 1, 5);
    back.post(*wires[1], 0, 5);
    at_home.post(*wires[0], 1, 5);
    ASSERT_TRUE(finish(wires, {&here.transfer, &there.transfer, &back.transfer, &at_home.transfer}));
    EXPECT_EQ(here.transfer.state, State::done) << here.transfer.error;
    EXPECT_TRUE(here.text() == there.memory) << size;
    EXPECT_TRUE(at_home.text() == back.memory) << size;
    EXPECT_EQ(there.transfer.bytes, size);
  }
}

TEST_P(WireTest, TellsPeersApart) {
  constexpr int kSize = 5;
  const Wires wires = make(kSize);
  std::list<Parcel> sent;
  std::map<std::pair<int, int>, Landing> received;
  std::vector<const Transfer*> all;
  for (int to = 0; to < kSize; ++to) {
    for (int from = 0; from < kSize; ++from) {
      if (from == to) continue;
      sent.emplace_back(c10::str(from, " to ", to)).post(*wires[size_t(from)], to, 3);
      all.push_back(&sent.back().transfer);
    }
  }
  for (int to = 0; to < kSize; ++to) {
    for (int from = kSize - 1; from >= 0; --from) {
      if (from == to) continue;
      Landing& landing = received.emplace(std::pair(from, to), 20).first->second;
      landing.post(*wires[size_t(to)], from, 3);
      all.push_back(&landing.transfer);
    }
  }
  ASSERT_TRUE(finish(wires, all));
  ASSERT_EQ(received.size(), 20);
  for (const auto& [pair, landing] : received) EXPECT_EQ(landing.text(), c10::str(pair.first, " to ", pair.second));
}

TEST_P(WireTest, FailsWhereAMessageIsLongerThanItsMemory) {
  const Wires wires = make(2);
  for (const size_t size : {2000, 300000}) {
    Parcel sent(message(size, 1)), next("next");
    std::string memory(size, '.');
    Transfer receive;
    wires[1]->receive(receive, 0, 7, memory.data(), 1000);
    sent.post(*wires[0], 1, 7);
    next.post(*wires[0], 1, 7);
    ASSERT_TRUE(finish(wires, {&receive, &sent.transfer}));
    EXPECT_EQ(receive.state, State::failed);
    EXPECT_EQ(receive.error,
              c10::str("a message of ", size, " bytes came from rank 0 where 1000 were expected (tag 7)"));
    EXPECT_EQ(memory.substr(1000), std::string(size - 1000, '.'));
    Landing after(4);
    after.post(*wires[1], 0, 7);
    ASSERT_TRUE(finish(wires, {&after.transfer, &next.transfer}));
    EXPECT_EQ(after.text(), "next");
  }
}

TEST_P(WireTest, SaysHowMuchCame) {
  const Wires wires = make(2);
  Parcel sent("four");
  Landing landing(100);
  landing.post(*wires[1], 0, 7);
  sent.post(*wires[0], 1, 7);
  ASSERT_TRUE(finish(wires, {&landing.transfer, &sent.transfer}));
  EXPECT_EQ(landing.text(), "four");
  EXPECT_EQ(landing.memory.substr(4), std::string(96, '.'));
}

TEST_P(WireTest, CancelsAReceiveWhichThenTakesNothing) {
  const Wires wires = make(2);
  Landing cancelled(10), taken(10);
  cancelled.post(*wires[1], 0, 7);
  taken.post(*wires[1], 0, 7);
  wires[1]->cancel(cancelled.transfer);
  EXPECT_EQ(cancelled.transfer.state, State::cancelled);
  Parcel sent("sent");
  sent.post(*wires[0], 1, 7);
  ASSERT_TRUE(finish(wires, {&taken.transfer, &sent.transfer}));
  EXPECT_EQ(taken.text(), "sent");
  EXPECT_EQ(cancelled.memory, "..........");
  wires[1]->cancel(taken.transfer);
  EXPECT_EQ(taken.transfer.state, State::done);
}

TEST_P(WireTest, EndsASendThatIsCancelled) {
  const Wires wires = make(2);
  std::list<Parcel> sent;
  for (int i = 0; i < 20; ++i) sent.emplace_back(message(1 << 20, i)).post(*wires[0], 1, 7);
  for (Parcel& parcel : sent) {
    wires[0]->cancel(parcel.transfer);
    EXPECT_TRUE(parcel.transfer.ended());
    parcel.memory.assign(parcel.memory.size(), '?');  // is the caller's again
  }
}

TEST_P(WireTest, TakesMemoryBackFromTheMiddleOfAMessage) {
  const Wires wires = make(2);
  meet(wires, 0, 1);
  Parcel sent(message(32 << 20, 1));
  Landing landing(32 << 20);
  landing.post(*wires[1], 0, 7);
  sent.post(*wires[0], 1, 7);
  // More than what lies between the two, which the sender would have to send on.
  for (int i = 0; i < 1000; ++i) wires[1]->progress();
  wires[1]->cancel(landing.transfer);
  ASSERT_TRUE(landing.transfer.ended());
  // Engines with threads of their own may have brought all of it.
  EXPECT_THAT(landing.transfer.state, ::testing::AnyOf(State::cancelled, State::done));
  landing.memory.assign(landing.memory.size(), '?');
  for (int i = 0; i < 1000; ++i) {
    wires[0]->progress();
    wires[1]->progress();
  }
  EXPECT_EQ(landing.memory.find_first_not_of('?'), std::string::npos);
  wires[0]->cancel(sent.transfer);
}

TEST_P(WireTest, GivesUpAPeerAndNoOther) {
  const Wires wires = make(3);
  meet(wires, 0, 1);
  meet(wires, 0, 2);
  std::list<Parcel> sent;
  Landing from_lost(10), from_other(10);
  from_lost.post(*wires[0], 1, 7);
  from_other.post(*wires[0], 2, 7);
  for (int i = 0; i < 20; ++i) sent.emplace_back(message(1 << 20, i)).post(*wires[0], 1, 7);
  wires[0]->give_up(1, "its launcher is silent");
  EXPECT_EQ(from_lost.transfer.state, State::failed);
  EXPECT_EQ(from_lost.transfer.error, "rank 1 is lost: its launcher is silent");
  for (const Parcel& parcel : sent) EXPECT_TRUE(parcel.transfer.ended());
  Parcel later("later"), other("other");
  Landing later_receive(10);
  later.post(*wires[0], 1, 8);
  later_receive.post(*wires[0], 1, 8);
  EXPECT_EQ(later.transfer.error, "rank 1 is lost: its launcher is silent");
  EXPECT_EQ(later_receive.transfer.error, "rank 1 is lost: its launcher is silent");
  EXPECT_FALSE(from_other.transfer.ended());
  other.post(*wires[2], 0, 7);
  ASSERT_TRUE(finish(wires, {&from_other.transfer, &other.transfer}));
  EXPECT_EQ(from_other.text(), "other");
}

/// Sleeps as a rank does that waits for `transfer`.
bool sleep_until_ended(Wire& wire, const Transfer& transfer) {
  while (!transfer.ended()) {
    if (wire.progress() || !wire.arm()) continue;
    pollfd waiting{.fd = wire.descriptor(), .events = POLLIN, .revents = 0};
    if (::poll(&waiting, 1, 20000) != 1) return false;
  }
  return true;
}

TEST_P(WireTest, WakesWhoSleepsOnItsDescriptor) {
  const Wires wires = make(2);
  constexpr int kRounds = 200;
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      Landing landing(100000);
      landing.post(*wires[1], 0, 1);
      ASSERT_TRUE(sleep_until_ended(*wires[1], landing.transfer));
      Parcel answer(landing.text());
      answer.post(*wires[1], 0, 2);
      ASSERT_TRUE(sleep_until_ended(*wires[1], answer.transfer));
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    Parcel question(message(size_t(i) * 500, i));
    Landing answer(100000);
    question.post(*wires[0], 1, 1);
    answer.post(*wires[0], 1, 2);
    EXPECT_TRUE(sleep_until_ended(*wires[0], question.transfer));
    EXPECT_TRUE(sleep_until_ended(*wires[0], answer.transfer));
    EXPECT_TRUE(answer.text() == question.memory) << i;
  }
  other.join();
}

TEST_P(WireTest, ServesSeveralThreads) {
  constexpr int kThreads = 3, kRounds = 60;
  const Wires wires = make(2);
  const auto finished = [](Wire& wire, const Transfer& transfer) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!transfer.ended() && std::chrono::steady_clock::now() < limit) {
      if (!wire.progress()) std::this_thread::yield();
    }
    return transfer.state == State::done;
  };
  const auto talk = [&](int rank, int thread) {
    Wire& wire = *wires[size_t(rank)];
    for (int round = 0; round < kRounds; ++round) {
      const size_t size = size_t((thread * 7919 + round * 5003) % 90000);
      Parcel mine(message(size, rank * 1000 + round));
      Landing theirs(size);
      theirs.post(wire, 1 - rank, uint64_t(thread));
      mine.post(wire, 1 - rank, uint64_t(thread));
      ASSERT_TRUE(finished(wire, mine.transfer)) << mine.transfer.error;
      ASSERT_TRUE(finished(wire, theirs.transfer)) << theirs.transfer.error;
      ASSERT_TRUE(theirs.text() == message(size, (1 - rank) * 1000 + round)) << size;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 2 * kThreads; ++i) threads.emplace_back(talk, i % 2, i / 2);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(WireTest, WakesWhoSleepsWhenAPeerIsGivenUp) {
  const Wires wires = make(2);
  Landing landing(10);
  landing.post(*wires[0], 1, 1);
  std::thread other([&] { wires[0]->give_up(1, "a test"); });
  EXPECT_TRUE(sleep_until_ended(*wires[0], landing.transfer));
  other.join();
  EXPECT_EQ(landing.transfer.error, "rank 1 is lost: a test");
}

TEST_P(WireTest, IsDestroyedWithTransfersUnderWay) {
  Wires wires = make(2);
  meet(wires, 0, 1);
  std::list<Parcel> sent;
  Landing landing(10), partly(1 << 20);
  for (int i = 0; i < 20; ++i) sent.emplace_back(message(1 << 20, i)).post(*wires[0], 1, 7);
  landing.post(*wires[0], 1, 7);
  partly.post(*wires[1], 0, 7);
  wires[1]->progress();
  wires[0].reset();
  EXPECT_EQ(landing.transfer.state, State::failed);
  for (const Parcel& parcel : sent) EXPECT_TRUE(parcel.transfer.ended());
  wires[1].reset();
  EXPECT_TRUE(partly.transfer.ended());
}

int64_t num_entries(const char* folder) {
  using Iterator = std::filesystem::directory_iterator;
  return std::distance(Iterator(folder), Iterator());
}

TEST_P(WireTest, LeavesNoDescriptorsAndNoThreads) {
  meet(make(2), 0, 1);
  const int64_t descriptors = num_entries("/proc/self/fd"), threads = num_entries("/proc/self/task");
  for (int i = 0; i < 5; ++i) meet(make(2), 0, 1);
  EXPECT_EQ(num_entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(num_entries("/proc/self/task"), threads);
}

TEST_P(WireTest, LivesBesideAnotherGroup) {
  const Wires some = make(2), others = make(2);
  Landing landing(10), other(10);
  landing.post(*some[1], 0, 7);
  other.post(*others[1], 0, 7);
  Parcel sent("sent"), other_sent("others");
  other_sent.post(*others[0], 1, 7);
  ASSERT_TRUE(finish(others, {&other.transfer, &other_sent.transfer}));
  EXPECT_EQ(other.text(), "others");
  some[1]->progress();
  EXPECT_FALSE(landing.transfer.ended());
  sent.post(*some[0], 1, 7);
  ASSERT_TRUE(finish(some, {&landing.transfer, &sent.transfer}));
  EXPECT_EQ(landing.text(), "sent");
}

TEST_P(WireTest, EndsReceivesFromAPeerThatHasLeft) {
  Wires wires = make(3);
  meet(wires, 0, 1);
  Landing landing(10), other(10);
  landing.post(*wires[0], 1, 7);
  other.post(*wires[0], 2, 7);
  wires[1].reset();
  ASSERT_TRUE(finish(wires, {&landing.transfer}));
  EXPECT_EQ(landing.transfer.state, State::failed);
  EXPECT_THAT(landing.transfer.error, HasSubstr("rank 1 is lost: "));
  EXPECT_FALSE(other.transfer.ended());
  wires[0]->cancel(other.transfer);
  Parcel sent("to nobody");
  sent.post(*wires[0], 1, 7);
  EXPECT_EQ(sent.transfer.state, State::failed);
}

TEST_P(WireTest, EndsReceivesFromAPeerThatNeverSentAnything) {
  Wires wires = make(2);
  Landing landing(10);
  landing.post(*wires[0], 1, 7);
  wires[1].reset();
  ASSERT_TRUE(finish(wires, {&landing.transfer}));
  EXPECT_THAT(landing.transfer.error, HasSubstr("rank 1 is lost: "));
}

TEST_P(WireTest, FailsWhatIsStartedAfterThePeerHasLeft) {
  Wires wires = make(2);
  wires[1].reset();
  Landing landing(10);
  landing.post(*wires[0], 1, 7);
  ASSERT_TRUE(finish(wires, {&landing.transfer}));
  EXPECT_THAT(landing.transfer.error, HasSubstr("rank 1 is lost: "));
  Parcel sent(message(1 << 20, 1));
  sent.post(*wires[0], 1, 7);
  EXPECT_EQ(sent.transfer.error, landing.transfer.error);
}

TEST_P(WireTest, DeliversWhatAPeerHasSentBeforeItLeft) {
  Wires wires = make(2);
  meet(wires, 0, 1);
  Parcel small("small"), large(message(1 << 20, 1));
  Landing posted(1 << 20), late(10), never(10);
  posted.post(*wires[0], 1, 1);
  never.post(*wires[0], 1, 3);
  large.post(*wires[1], 0, 1);
  small.post(*wires[1], 0, 2);
  ASSERT_TRUE(finish(wires, {&small.transfer, &large.transfer}));
  wires[1].reset();
  ASSERT_TRUE(finish(wires, {&never.transfer, &posted.transfer}));
  late.post(*wires[0], 1, 2);
  ASSERT_TRUE(finish(wires, {&late.transfer}));
  EXPECT_TRUE(posted.text() == large.memory) << posted.transfer.error;
  EXPECT_EQ(late.text(), "small") << late.transfer.error;
  EXPECT_EQ(never.transfer.state, State::failed);
}

TEST_P(WireTest, RefusesTagsAndRanksThatAreNone) {
  const Wires wires = make(2);
  Parcel sent("x");
  Landing landing(1);
  sent.post(*wires[0], 1, uint64_t(1) << net::kTagBits);
  EXPECT_EQ(sent.transfer.error, "tag 281474976710656 has more than 48 bits");
  landing.post(*wires[0], 1, uint64_t(1) << net::kTagBits);
  EXPECT_EQ(landing.transfer.error, "tag 281474976710656 has more than 48 bits");
  sent.post(*wires[0], 2, 1);
  EXPECT_EQ(sent.transfer.error, "there is no rank 2 among 2");
  landing.post(*wires[0], -1, 1);
  EXPECT_EQ(landing.transfer.error, "there is no rank -1 among 2");
}

INSTANTIATE_TEST_SUITE_P(Threads, WireTest, ::testing::Values("threads"));
INSTANTIATE_TEST_SUITE_P(Gloo, WireTest, ::testing::Values("gloo"));
#ifdef SERRIED_WITH_UCX
INSTANTIATE_TEST_SUITE_P(Ucx, WireTest, ::testing::Values("ucx"));

std::string library_of(const void* address) {
  Dl_info info{};
  return ::dladdr(address, &info) == 0 || info.dli_fname == nullptr ? "" : info.dli_fname;
}

TEST(UcxWire, RefusesMoreRanksThanItsTagsHold) {
  const Wires wires = make_wires("ucx", 1);
  const std::string text = error_text<c10::ValueError>([&] { wires[0]->connect(std::vector<std::string>(65537)); });
  EXPECT_THAT(text, HasSubstr("[new_group] 65537 ranks are more than the 65536 that fit into UCX's tags"));
}

TEST(UcxWire, SaysThatAnAddressIsNotOfThisHost) {
  const auto make = reinterpret_cast<net::WireFactory>(net::load_ucx().function);
  const std::string text = error_text<c10::DistBackendError>([&] { make("203.0.113.1", 0); });
  EXPECT_THAT(text, HasSubstr("[new_group] UCX: no device of this host has the address 203.0.113.1\n  fix: "));
}

TEST(UcxWire, ADeviceThatWasAskedForAndIsNotThereIsNamedByAllRanks) {
  const ScopedEnv env{{"UCX_NET_DEVICES", "nonsense"}};
  const std::string what = "UCX_NET_DEVICES is \"nonsense\", and UCX finds no such device here";
  const auto make = reinterpret_cast<net::WireFactory>(net::load_ucx().function);
  EXPECT_THAT(error_text<c10::ValueError>([&] { make("127.0.0.1", 0); }),
              HasSubstr("[new_group] " + what + "\n  fix: name devices of this host, of which are lo"));
  EXPECT_EQ(net::why_no_ucx(), "[new_group] " + what);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make_wire = [&](int rank, const char* engine) {
    return error_text<c10::ValueError>([&] {
      net::make_wire({.store = store, .rank = rank, .world_size = 2, .timeout = std::chrono::seconds(20)},
                     {.address = "127.0.0.1", .engine = engine});
    });
  };
  auto other = std::async(std::launch::async, make_wire, 0, "gloo");
  EXPECT_THAT(make_wire(1, "auto"), HasSubstr("[new_group] rank 1 has no wire: " + what + "\n  fix: name devices of"));
  EXPECT_THAT(other.get(), HasSubstr("[new_group] rank 1 has no wire: " + what));
}

TEST(UcxWire, LeavesTheProcessAsItIs) {
  const Wires wires = make_wires("ucx", 2);
  EXPECT_EQ(std::getenv("UCX_LOG_LEVEL"), nullptr);
  for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) {
    struct sigaction action {};
    ASSERT_EQ(::sigaction(signal, nullptr, &action), 0);
    EXPECT_THAT(library_of(reinterpret_cast<const void*>(action.sa_handler)), Not(HasSubstr("libuc"))) << signal;
  }
#ifdef __x86_64__
  constexpr unsigned char kJump = 0xe9;
  EXPECT_NE(*reinterpret_cast<const unsigned char*>(::dlsym(RTLD_DEFAULT, "madvise")), kJump);
#endif
}
#endif

}  // namespace
}  // namespace serried::testing
