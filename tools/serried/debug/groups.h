// The calls of a group, of all its ranks by number, from dumps of several hosts on one clock.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "serried/launch/seen.h"

namespace serried::debug {

/// A rank as one group has it.
struct Member {
  const launch::HostSeen* host = nullptr;
  const launch::RankSeen* rank = nullptr;
  const launch::GroupSeen* group = nullptr;
  std::map<uint64_t, const launch::CallSeen*> calls = {};  // collectives that the ring still has, by sequence

  /// In the job.
  int number() const { return group->job_rank >= 0 ? group->job_rank : rank->rank; }
  /// On node 0's clock, as far as it is known.
  double seconds(int64_t ns) const { return 1e-9 * (double(ns) + double(host->clock_offset_ns)); }
  double seconds_ago(int64_t ns) const { return ns >= host->now_ns ? 0 : double(host->now_ns - ns) * 1e-9; }
};

struct GroupView {
  std::string name;
  int world_size = 0;
  std::vector<Member> members = {};  // by rank in the group
};

/// All groups that were not closed, and closed ones whose calls are still there.
std::vector<GroupView> groups_of(const std::vector<launch::HostSeen>& dumps);

/// Ranks of the group that no dump has.
std::vector<int> unknown_of(const GroupView& group);

/// The first call that two ranks have under one number and that is not the same; 0: none.
uint64_t first_difference(const GroupView& group);

/// The highest number that a rank has begun.
uint64_t newest_of(const GroupView& group);

/// How late a rank is to calls that all ranks have, in the middle of the cases: against the first to come.
struct Lateness {
  int rank = -1;  // in the job; -1: no call says so
  double seconds = 0;
  int num_last = 0;  // of so many calls it was the last
  int num_calls = 0;
};
Lateness latest_of(const GroupView& group);

}  // namespace serried::debug
