// Who has not come, in lines: from values, without processes.
#include "serried/launch/waiting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/launch/seen_json.h"

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNow = 1000 * kSecond;

CallSeen sum(uint64_t sequence, double seconds_ago) {
  return {.sequence = sequence,
          .text = "#" + std::to_string(sequence) + " all_reduce f32[512] sum",
          .begun_ns = kNow - int64_t(seconds_ago * kSecond)};
}

/// Of a group of `world_size`, whose rank this is.
RankSeen waits(int rank, int world_size, uint64_t sequence, double seconds) {
  GroupSeen group{.name = "shm/ab12/dp", .rank = rank, .world_size = world_size, .job_rank = rank};
  group.newest = sum(sequence, seconds);
  group.open = {group.newest};
  group.ended_sequence = sequence - 1;
  return {.rank = rank, .pid = 100 + rank, .state = 'S', .groups = {group}};
}

RankSeen left(int rank, int world_size, uint64_t sequence, double seconds_ago, char state) {
  GroupSeen group{.name = "shm/ab12/dp", .rank = rank, .world_size = world_size, .job_rank = rank};
  group.newest = sum(sequence, seconds_ago + 1);
  group.ended_sequence = sequence;
  group.ended_ns = kNow - int64_t(seconds_ago * kSecond);
  return {.rank = rank, .pid = 100 + rank, .state = state, .groups = {group}};
}

HostSeen host(const std::string& name, int node, std::vector<RankSeen> ranks) {
  return {.host = name, .node = node, .job = "ab12", .world_size = 8, .now_ns = kNow, .ranks = std::move(ranks)};
}

std::vector<std::string> texts(const std::vector<HostSeen>& hosts) {
  std::vector<std::string> texts;
  for (const Stall& stall : find_stalls(hosts, Seconds(5))) texts.push_back(stall.text);
  return texts;
}

TEST(Stalls, NameTheOneRankThatIsMissingAcrossHosts) {
  std::vector<RankSeen> here, there;
  for (const int rank : {0, 1, 2}) here.push_back(waits(rank, 8, 183, 5));
  here.push_back(left(3, 8, 182, 12.3, 'T'));
  for (const int rank : {4, 5, 6, 7}) there.push_back(waits(rank, 8, 183, 5));
  EXPECT_THAT(texts({host("h1", 0, here), host("h2", 1, there)}),
              ElementsAre("group shm/dp: rank 3 (h1) has not come to #183 all_reduce f32[512] sum; 7 ranks wait since "
                          "5.0 s; rank 3 left #182 12.3 s ago and is stopped (T)"));
}

TEST(Stalls, OneHostIsNotNamed) {
  EXPECT_THAT(texts({host("h1", 0, {waits(0, 3, 2, 6), left(1, 3, 1, 6, 'R'), left(2, 3, 1, 7, 'S')})}),
              ElementsAre("group shm/dp: ranks 1, 2 have not come to #2 all_reduce f32[512] sum; rank 0 waits since "
                          "6.0 s; rank 1 left #1 6.0 s ago and runs (R); rank 2 left #1 7.0 s ago and sleeps (S)"));
}

TEST(Stalls, WhoIsUnknownIsSaidToBe) {
  EXPECT_THAT(texts({host("h1", 0, {waits(0, 3, 2, 6), waits(1, 3, 2, 6)})}),
              ElementsAre("group shm/dp: rank 2 of the group has not come to #2 all_reduce f32[512] sum; 2 ranks wait "
                          "since 6.0 s; of rank 2 of the group nothing is known"));
}

TEST(Stalls, WhoWaitsElsewhereIsNotAskedForItsState) {
  RankSeen elsewhere = left(1, 2, 1, 6, 'S');
  GroupSeen other{.name = "gloo/ab12/tp", .rank = 0, .world_size = 2, .job_rank = 1};
  other.newest = other.open.emplace_back(CallSeen{.sequence = 5, .text = "#5 barrier", .begun_ns = kNow - 7 * kSecond});
  elsewhere.groups.push_back(other);
  const std::vector<std::string> lines = texts({host("h1", 0, {waits(0, 2, 2, 6), elsewhere})});
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[1], HasSubstr("; rank 1 left #1 6.0 s ago and waits in #5 barrier of group gloo/tp since 7.0 s"));
}

TEST(Stalls, AllMayHaveCome) {
  RankSeen stopped = waits(1, 2, 2, 6);
  stopped.state = 'T';
  EXPECT_THAT(texts({host("h1", 0, {waits(0, 2, 2, 6), stopped})}),
              ElementsAre("group shm/dp: 2 ranks wait since 6.0 s in #2 all_reduce f32[512] sum, to which all have "
                          "come; rank 1 is stopped (T)"));
}

TEST(Stalls, OthersMayBeAheadOfWhoHoldsThemUp) {
  RankSeen stopped = waits(1, 3, 2, 6);
  stopped.state = 'T';
  EXPECT_THAT(texts({host("h1", 0, {waits(0, 3, 3, 5.5), stopped, waits(2, 3, 3, 5.5)})}),
              ElementsAre("group shm/dp: rank 1 waits since 6.0 s in #2 all_reduce f32[512] sum, to which all have "
                          "come; rank 1 is stopped (T); 2 ranks wait in later calls"));
}

TEST(Stalls, MessagesNameTheirPeer) {
  RankSeen receiver = left(0, 2, 1, 9, 'S');
  receiver.groups[0].open = {{.text = "recv f32[4] from rank 1", .begun_ns = kNow - 6 * kSecond}};
  EXPECT_THAT(texts({host("h1", 0, {receiver, left(1, 2, 1, 9, 'T')})}),
              ElementsAre("group shm/dp: rank 0 waits in recv f32[4] from rank 1 since 6.0 s; rank 1 left #1 9.0 s "
                          "ago and is stopped (T)"));
}

TEST(Stalls, WhatIsYoungerIsNone) {
  EXPECT_THAT(texts({host("h1", 0, {waits(0, 2, 2, 4.9), left(1, 2, 1, 4.9, 'R')})}), IsEmpty());
  EXPECT_THAT(texts({}), IsEmpty());
  RankSeen closed = waits(0, 2, 2, 60);
  closed.groups[0].closed = true;
  EXPECT_THAT(texts({host("h1", 0, {closed})}), IsEmpty());
}

TEST(Stalls, AreToldEverMoreSeldomAndWhenTheyAreOver) {
  StallLines lines;
  const auto stall = [](double seconds) { return std::vector<Stall>{{"group dp: #2", "it waits", seconds}}; };
  EXPECT_THAT(lines.update(stall(5)), ElementsAre("it waits"));
  EXPECT_THAT(lines.update(stall(9)), IsEmpty());
  EXPECT_THAT(lines.update(stall(10)), ElementsAre("it waits"));
  EXPECT_THAT(lines.update(stall(19)), IsEmpty());
  EXPECT_THAT(lines.update(stall(20)), ElementsAre("it waits"));
  EXPECT_FALSE(lines.empty());
  EXPECT_THAT(lines.update({}), ElementsAre("group dp: #2 went on after 20.0 s"));
  EXPECT_THAT(lines.update({}), IsEmpty());
  EXPECT_TRUE(lines.empty());
}

TEST(SeenJson, ComesBackAsItWas) {
  HostSeen seen = host("h1", 1, {waits(0, 2, 2, 6), left(1, 2, 1, 6, 'T')});
  seen.version = "serried 1";
  seen.why = "rank 1 failed";
  seen.has_clock = true;
  seen.clock_offset_ns = -5;
  seen.clock_error_ns = 7;
  seen.ranks[0].calls = {sum(1, 9), {.text = "recv f32[4] from rank 1", .group = 3, .failed = true}};
  seen.ranks[0].calls[0].agreed = "agreed";
  seen.ranks[0].calls[0].part_of = "item()";
  seen.ranks[0].num_calls = 5;
  seen.ranks[1].stack = "#0 main\n#1 start\n";
  seen.ranks[1].problem = "gone";
  EXPECT_EQ(host_seen_from(to_json(seen)), seen);
  EXPECT_EQ(host_seen_from(to_json(seen, /*spaced=*/true)), seen);
  EXPECT_EQ(host_seen_from(to_json({})), HostSeen());
}

std::string refusal(const std::string& text) {
  try {
    host_seen_from(text);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "taken";
}

TEST(SeenJson, SaysWhatIsWrong) {
  EXPECT_EQ(refusal("{\"format\": \"serried"), "it is no JSON, or has broken off");
  EXPECT_EQ(refusal("[]"), "a value is no object");
  EXPECT_EQ(refusal("{\"format\": \"other\"}"), "its format is \"other\", and this serried reads \"serried dump 1\"");
  const std::string head = "{\"format\": \"serried dump 1\", ";
  EXPECT_EQ(refusal(head + "\"host\": 3}"), "\"host\" is no text");
  EXPECT_EQ(refusal(head + "\"node\": 1.5}"), "\"node\" is no whole number");
  EXPECT_EQ(refusal(head + "\"node\": -1}"), "\"node\" is -1");
  EXPECT_EQ(refusal(head + "\"now\": 99999999999999999999}"), "\"now\" is no whole number");
  EXPECT_EQ(refusal(head + "\"attempt\": 4294967296}"), "\"attempt\" is too large");
  EXPECT_EQ(refusal(head + "\"has_clock\": 1}"), "\"has_clock\" is neither true nor false");
  EXPECT_EQ(refusal(head + "\"ranks\": {}}"), "\"ranks\" is no list");
  EXPECT_EQ(refusal(head + "\"ranks\": [{\"num_calls\": -1}]}"), "\"num_calls\" is negative");
}

}  // namespace
}  // namespace serried::launch
