// Collectives in the trace: what they say about themselves, on which row, and who waits.
#include "serried/comm/collectives/traced.h"

#include <algorithm>
#include <map>

#include "serried/comm/collectives/async.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/traced.h"

namespace serried {
namespace {

using testing::begin_of;
using testing::end_of;
using testing::json;
using testing::named;
using testing::slices_of;

class TracedCollectives : public ::testing::TestWithParam<const char*> {
 protected:
  static std::vector<json> slices(int num_ranks, const std::function<void(const Group&)>& fn) {
    return slices_of([&] { run_ranks(num_ranks, fn, {.backend = GetParam()}); });
  }
};

TEST_P(TracedCollectives, SayWhatTheyMoveAndWhoTakesPart) {
  const auto slices = this->slices(3, [](const Group& g) {
    barrier(g);
    all_reduce_(torch::ones({5, 3}), g);
    broadcast_(torch::ones({7}, at::kLong), g, {.src = 1});
  });
  std::vector<json> groups;
  for (const int rank : {0, 1, 2}) {
    const auto barriers = named(slices, rank, "barrier"), sums = named(slices, rank, "all_reduce"),
               copies = named(slices, rank, "broadcast");
    ASSERT_EQ(barriers.size(), 1U);
    ASSERT_EQ(sums.size(), 1U);
    ASSERT_EQ(copies.size(), 1U);
    for (const json& slice : {barriers[0], sums[0], copies[0]}) {
      EXPECT_EQ(slice.at("cat"), "communication");
      EXPECT_EQ(slice.at("args").at("group_size"), 3);
      groups.push_back(slice.at("args").at("group"));
    }
    EXPECT_FALSE(barriers[0].at("args").contains("bytes"));
    EXPECT_EQ(sums[0].at("args").at("bytes"), 15 * 4);
    EXPECT_EQ(sums[0].at("args").at("dtype"), "f32");
    EXPECT_EQ(copies[0].at("args").at("bytes"), 7 * 8);
    EXPECT_EQ(copies[0].at("args").at("dtype"), "i64");
    EXPECT_EQ(copies[0].at("args").at("root"), 1);
    const int64_t sequence = barriers[0].at("args").at("sequence");
    EXPECT_EQ(sums[0].at("args").at("sequence"), sequence + 1);
    EXPECT_EQ(copies[0].at("args").at("sequence"), sequence + 2);
  }
  EXPECT_EQ(std::count(groups.begin(), groups.end(), groups[0]), int(groups.size())) << "one name on all ranks";
}

TEST_P(TracedCollectives, ABlockingCallIsOnTheTrackOfItsGroupAndItsThreadWaits) {
  const auto slices = this->slices(2, [](const Group& g) { all_reduce_(torch::ones({5}), g); });
  for (const int rank : {0, 1}) {
    const auto calls = named(slices, rank, "all_reduce"), waits = named(slices, rank, "wait for all_reduce");
    ASSERT_EQ(calls.size(), 1U);
    ASSERT_EQ(waits.size(), 1U);
    EXPECT_EQ(waits[0].at("cat"), "wait");
    EXPECT_EQ(waits[0].at("args").at("sequence"), calls[0].at("args").at("sequence"));
    EXPECT_EQ(waits[0].at("args").at("group"), calls[0].at("args").at("group"));
    EXPECT_NE(waits[0].at("tid"), calls[0].at("tid"));
  }
}

TEST_P(TracedCollectives, AnAsynchronousCallLastsWhileItsThreadDoesOtherThings) {
  const auto slices = this->slices(2, [](const Group& g) {
    // The other rank comes only when this one does other things.
    if (g->getRank() == 1) recv(torch::ones({1}), g, {.peer = 0});
    const Pending sum = async::all_reduce(torch::ones({5}), g);
    if (g->getRank() == 0) {
      const trace::Span span("other things");
      send(torch::ones({1}), g, {.peer = 1});
    }
    sum.wait();
  });
  const auto calls = named(slices, 0, "all_reduce"), others = named(slices, 0, "other things"),
             waits = named(slices, 0, "wait for all_reduce");
  ASSERT_EQ(calls.size(), 1U);
  ASSERT_EQ(others.size(), 1U);
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_LE(begin_of(calls[0]), begin_of(others[0]));
  EXPECT_GE(end_of(calls[0]), begin_of(others[0]));
  EXPECT_GE(begin_of(waits[0]), end_of(others[0]));
}

TEST_P(TracedCollectives, TransfersNameTheirPeer) {
  const auto slices = this->slices(2, [](const Group& g) {
    if (g->getRank() == 0) send(torch::ones({3}), g, {.peer = 1});
    if (g->getRank() == 1) recv(torch::ones({3}), g, {.peer = 0});
  });
  const auto sent = named(slices, 0, "send"), received = named(slices, 1, "recv");
  ASSERT_EQ(sent.size(), 1U);
  ASSERT_EQ(received.size(), 1U);
  EXPECT_EQ(sent[0].at("args").at("peer"), 1);
  EXPECT_EQ(received[0].at("args").at("peer"), 0);
  EXPECT_EQ(received[0].at("args").at("bytes"), 12);
  EXPECT_FALSE(sent[0].at("args").contains("sequence"));
}

TEST_P(TracedCollectives, SlicesOfOneRowNeverOverlap) {
  const auto slices = this->slices(2, [](const Group& g) {
    std::vector<Pending> sums;
    for (int i = 0; i < 8; ++i) sums.push_back(async::all_reduce(torch::ones({50'000}), g));
    for (const Pending& sum : sums) sum.wait();
  });
  for (const int rank : {0, 1}) {
    const auto calls = named(slices, rank, "all_reduce");
    ASSERT_EQ(calls.size(), 8U);
    std::map<int, double> busy_until;
    for (const json& call : calls) {
      double& until = busy_until[call.at("tid")];
      EXPECT_GE(begin_of(call) + 1e-3, until);  // they are written in microseconds, with rounding
      until = end_of(call);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, TracedCollectives, ::testing::Values("threads", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TracedCalls, NothingIsRecordedWhenTracingIsOff) {
  trace::take_slices();
  run_ranks(2, [](const Group& g) { all_reduce_(torch::ones({5}), g); });
  EXPECT_TRUE(trace::take_slices().empty());
}

TEST(TracedCalls, ThatFailSaySo) {
  const auto slices = slices_of(
      [] { EXPECT_ANY_THROW(run_ranks(2, [](const Group& g) { all_reduce_(torch::ones({g->getRank() + 1}), g); })); });
  for (const int rank : {0, 1}) {
    const auto calls = named(slices, rank, "all_reduce");
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].at("args").at("failed"), 1);
  }
}

TEST(TracedCalls, OfAForeignBackendAreCallsOfTheirThread) {
  const auto slices = slices_of([] {
    const Group g = new_group("fake", {.rank = 0, .world_size = 4});
    all_reduce_(torch::ones({5}), g);
  });
  const auto calls = named(slices, 0, "all_reduce");
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0].at("args").at("bytes"), 20);
  EXPECT_EQ(calls[0].at("args").at("backend"), "fake");
}

}  // namespace
}  // namespace serried
