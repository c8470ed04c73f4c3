// Steps of collectives: bytes that leave hosts, by the closed forms of their decompositions.
#include "tools/serried/simulate/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/simulate/machines.h"

namespace serried::simulation {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kHead = 128;  // of what a rank tells one rank of each other host

int64_t out_of(const std::vector<Step>& steps, size_t host) {
  int64_t bytes = 0;
  for (const Step& step : steps) bytes += step.out_of(host);
  return bytes;
}

int64_t into(const std::vector<Step>& steps, size_t host) {
  int64_t bytes = 0;
  for (const Step& step : steps) bytes += step.into(host);
  return bytes;
}

TEST(SimulatedCollective, SmallOnesTravelWithTheArrival) {
  const std::vector<Step> steps = steps_of({Kind::all_reduce, 1024}, {2, 2, 2});
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].out_of(1), 2 * 2 * (kHead + 1024));
  EXPECT_EQ(steps_of({Kind::barrier, 0}, {1, 1}).at(0).out_of(0), kHead);
}

TEST(SimulatedCollective, OneRankPerHostScattersAndGathers) {
  const std::vector<Step> steps = steps_of({Kind::all_reduce, 4 * kMiB}, {1, 1, 1, 1});
  EXPECT_EQ(out_of(steps, 2), 2 * 4 * kMiB * 3 / 4 + 3 * kHead);
  EXPECT_EQ(into(steps, 2), 2 * 4 * kMiB * 3 / 4 + 3 * kHead);
}

TEST(SimulatedCollective, ChainSendsSumsUpAndResultsBack) {
  const std::vector<Step> two = steps_of({Kind::all_reduce, 4 * kMiB}, {2, 2});
  EXPECT_EQ(out_of(two, 0), 4 * kMiB + 2 * kHead);
  EXPECT_EQ(out_of(two, 1), 4 * kMiB + 2 * kHead);
  const std::vector<Step> three = steps_of({Kind::all_reduce, 4 * kMiB, 4, Order::ranks}, {2, 2, 2});
  EXPECT_EQ(out_of(three, 0), 4 * kMiB + 4 * kHead);
  EXPECT_EQ(out_of(three, 1), 8 * kMiB + 4 * kHead);
  EXPECT_EQ(into(three, 1), 8 * kMiB + 4 * kHead);
}

// As few bytes as can be: of what H hosts make, all but one share leaves each, and comes back as results.
TEST(SimulatedCollective, MoreHostsThanTwoExchangeTheirSums) {
  for (const int64_t ranks : {1, 2, 8}) {
    const std::vector<Step> steps = steps_of({Kind::all_reduce, 4 * kMiB}, {ranks, ranks, ranks, ranks});
    EXPECT_EQ(out_of(steps, 1), 2 * 4 * kMiB * 3 / 4 + 3 * ranks * kHead) << ranks;
    const std::vector<Step> scattered = steps_of({Kind::reduce_scatter, 4 * kMiB}, {ranks, ranks, ranks, ranks});
    EXPECT_EQ(out_of(scattered, 1), 4 * kMiB * 3 / 4 + 3 * ranks * kHead) << ranks;
  }
  EXPECT_EQ(steps_of({Kind::reduce, 4 * kMiB}, {2, 2, 2}).at(1).out_of(2), 4 * kMiB);
  EXPECT_EQ(steps_of({Kind::reduce, 4 * kMiB}, {2, 2, 2}).at(1).out_of(0), 0);
}

TEST(SimulatedCollective, HalfPrecisionGoesUpTheChainInSingle) {
  const std::vector<Step> steps = steps_of({Kind::all_reduce, 4 * kMiB, 2}, {2, 2});
  EXPECT_EQ(steps.at(1).up, 8 * kMiB);
  EXPECT_EQ(steps.at(1).down, 4 * kMiB);
}

TEST(SimulatedCollective, PiecesGoOnceToEachOtherHost) {
  const std::vector<Step> steps = steps_of({Kind::all_gather, kMiB}, {3, 1, 2});
  EXPECT_EQ(out_of(steps, 0), 3 * 2 * (kMiB + kHead));
  EXPECT_EQ(into(steps, 1), 5 * (kMiB + kHead));
  // Whoever gives nothing says so in a table of the ranks, a cache line here.
}

TEST(SimulatedCollective, ABroadcastIsPassedOnFromHostToHost) {
  const std::vector<Step> steps = steps_of({Kind::broadcast, kMiB}, {2, 2, 2});
  EXPECT_EQ(out_of(steps, 0), kMiB + 2 * (2 * kHead + 64));
  EXPECT_EQ(out_of(steps, 1), kMiB + 2 * 2 * (kHead + 64));
  EXPECT_EQ(out_of(steps, 2), 2 * 2 * (kHead + 64));
}

TEST(SimulatedCollective, SumsForOwnersGoUpTheChainAndBackToThem) {
  // Half of the result belongs to each host.
  const std::vector<Step> scattered = steps_of({Kind::reduce_scatter, 4 * kMiB}, {2, 2});
  EXPECT_EQ(out_of(scattered, 0), 4 * kMiB + 2 * kHead);
  EXPECT_EQ(out_of(scattered, 1), 2 * kMiB + 2 * kHead);
  const std::vector<Step> rooted = steps_of({Kind::reduce, 4 * kMiB, 4, Order::ranks}, {2, 1, 2});
  EXPECT_EQ(out_of(rooted, 0), 4 * kMiB + 4 * kHead);
  EXPECT_EQ(out_of(rooted, 1), 4 * kMiB + 2 * kHead);
  EXPECT_EQ(out_of(rooted, 2), 4 * kMiB + 4 * kHead);
}

TEST(SimulatedCollective, PiecesOfEachPairLeaveTheirHost) {
  // 4 ranks, 2 of them elsewhere: half of what each has leaves its host.
  EXPECT_EQ(out_of(steps_of({Kind::all_to_all, 4 * kMiB}, {2, 2}), 1), 2 * 2 * kMiB + 2 * kHead);
}

TEST(SimulatedCollective, OneHostSharesItsMemory) {
  const std::vector<Step> steps = steps_of({Kind::all_gather, kMiB}, {4});
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].out_of(0), 0);
  EXPECT_EQ(steps[0].copied.at(0), 4 * 3 * kMiB);
  EXPECT_EQ(steps_of({Kind::all_reduce, kMiB}, {1}).at(0).copied.at(0), 0);
}

TEST(SimulatedCollective, WhatLeavesHostsArrives) {
  for (const Kind kind : {Kind::all_reduce, Kind::reduce, Kind::reduce_scatter, Kind::all_gather, Kind::gather,
                          Kind::scatter, Kind::broadcast, Kind::all_to_all, Kind::barrier}) {
    for (const HostSizes& hosts : {HostSizes{1, 1}, HostSizes{3, 1}, HostSizes{2, 2, 1}, HostSizes{4, 4, 4, 4}}) {
      for (const int64_t bytes : {0L, 960L, 983040L}) {
        int64_t left = 0, arrived = 0;
        const std::vector<Step> steps = steps_of({kind, bytes}, hosts);
        for (size_t host = 0; host < hosts.size(); ++host) left += out_of(steps, host), arrived += into(steps, host);
        EXPECT_EQ(left, arrived) << name_of(kind) << " " << bytes;
        for (const Step& step : steps) EXPECT_EQ(Traffic(step).out_of(0, hosts.size()), 0) << step.name;
      }
    }
  }
}

TEST(SimulatedCollective, WordsAreThoseOfTheLibrary) {
  EXPECT_EQ(kind_of("reduce_scatter"), Kind::reduce_scatter);
  EXPECT_EQ(kind_of("send"), std::nullopt);
  EXPECT_STREQ(name_of(Kind::all_to_all), "all_to_all");
}

TEST(SimulatedCollective, BytesThatCannotBeCountedAreNamed) {
  EXPECT_EQ(error_of([] {
              steps_of({Kind::all_gather, int64_t(1) << 60}, {2, 2});
            }),
            "all_gather of 1152921504606846976 bytes over 4 ranks moves more bytes than can be counted\n"
            "  fix: make the model or the mesh smaller");
}

}  // namespace
}  // namespace serried::simulation
