// What launchers see of their ranks, as values: for lines while ranks wait, and for dumps. Times are CLOCK_MONOTONIC of
// the host in ns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace serried::launch {

struct CallSeen {
  uint64_t sequence = 0;     // 0: it has not begun, or it is a send or receive
  std::string text = {};     // "#183 all_reduce f32[512] sum"; "" where there is no call
  std::string agreed = {};   // the part of the text that has to be the same on all ranks; "": all of it
  std::string part_of = {};  // what the user called: "item()"; "": just that
  uint64_t group = 0;        // GroupSeen::id
  int64_t issued_ns = 0;
  int64_t begun_ns = 0;  // 0: not yet
  int64_t ended_ns = 0;  // 0: not yet
  bool failed = false;

  bool operator==(const CallSeen&) const = default;
};

/// A group as one rank has it.
struct GroupSeen {
  uint64_t id = 0;  // of this process alone
  std::string name = {};
  int rank = 0;
  int world_size = 0;
  int job_rank = -1;
  bool closed = false;
  uint64_t num_issued = 0;  // collectives
  uint64_t num_ended = 0;
  uint64_t ended_sequence = 0;
  int64_t ended_ns = 0;
  CallSeen newest = {};             // collective that has begun
  std::vector<CallSeen> open = {};  // the first collective that has begun and not ended, and what is waited for

  bool operator==(const GroupSeen&) const = default;
};

struct RankSeen {
  int rank = 0;  // in the job, as the launcher numbers it
  int pid = 0;
  char state = '?';  // as in /proc/<pid>/stat; 'Z': it has ended
  std::vector<GroupSeen> groups = {};
  uint64_t num_calls = 0;
  std::vector<CallSeen> calls = {};  // in a dump: the newest, oldest first
  std::string stack = {};            // in a dump, where a tool for it is there
  std::string problem = {};          // why nothing is known of its groups

  bool operator==(const RankSeen&) const = default;
};

/// All ranks of one host.
struct HostSeen {
  std::string version = {};
  std::string host = {};
  int node = 0;
  std::string job = {};  // its id
  int attempt = 0;
  int world_size = 0;
  std::string why = {};  // what the dump was made for
  int64_t now_ns = 0;
  bool has_clock = false;       // of node 0, compared with its own
  int64_t clock_offset_ns = 0;  // to be added to times of this host
  int64_t clock_error_ns = 0;   // at most
  std::vector<RankSeen> ranks = {};

  bool operator==(const HostSeen&) const = default;
};

}  // namespace serried::launch
