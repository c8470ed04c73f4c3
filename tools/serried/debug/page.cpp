// From groups to text.
#include "tools/serried/debug/page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <sstream>

#include "serried/base/call_text.h"
#include "tools/serried/debug/groups.h"
#include "tools/serried/top/text.h"

namespace serried::debug {
namespace {

using launch::CallSeen;
using launch::HostSeen;
using launch::RankSeen;
using top::duration_text;
using top::ranks_text;

constexpr uint64_t kBefore = 3;  // calls shown around the one that matters
constexpr uint64_t kAfter = 1;
constexpr int kMostStackLines = 12;
constexpr double kLate = 1e-3;

std::string milliseconds_text(double seconds) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3f ms", 1e3 * seconds);
  return text;
}

std::string clock_text(const HostSeen& host) {
  if (host.node == 0) return "";
  if (!host.has_clock) return "; its clock was not compared with node 0's";
  return "; its clock and node 0's: " + milliseconds_text(1e-9 * double(host.clock_offset_ns)) + " apart, known to " +
         milliseconds_text(1e-9 * double(host.clock_error_ns));
}

std::vector<int> numbers_of(const std::vector<RankSeen>& ranks) {
  std::vector<int> numbers;
  for (const RankSeen& rank : ranks) numbers.push_back(rank.rank);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void add_host(std::ostream& out, const HostSeen& host) {
  out << "host " << host.host << ": node " << host.node << ", " << ranks_text(numbers_of(host.ranks))
      << clock_text(host) << "\n";
  for (const RankSeen& rank : host.ranks) {
    if (!rank.problem.empty()) out << "  rank " << rank.rank << " keeps no calls: " << rank.problem << "\n";
    if (rank.problem.empty() && rank.groups.empty()) out << "  rank " << rank.rank << " has made no group\n";
  }
}

void add_head(std::ostream& out, const std::vector<HostSeen>& dumps) {
  const HostSeen& first = dumps.front();
  out << "job " << first.job << ", attempt " << first.attempt << ": " << first.world_size << " ranks, "
      << (dumps.size() == 1 ? "a dump" : std::to_string(dumps.size()) + " dumps") << " by " << first.version << "\n";
  std::set<std::string> reasons;
  for (const HostSeen& host : dumps) {
    if (!host.why.empty() && reasons.insert(host.why).second) out << "made because " << host.why << "\n";
    if (host.job != first.job || host.attempt != first.attempt) {
      out << "the dump of " << host.host << " is of another run: job " << host.job << ", attempt " << host.attempt
          << "\n";
    }
  }
}

void add_missing_ranks(std::ostream& out, const std::vector<HostSeen>& dumps) {
  std::set<int> known;
  int world_size = 0;
  for (const HostSeen& host : dumps) {
    world_size = std::max(world_size, host.world_size);
    for (const RankSeen& rank : host.ranks) known.insert(rank.rank);
  }
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!known.contains(rank)) missing.push_back(rank);
  }
  if (!missing.empty()) out << "no dump has " << ranks_text(missing) << ": get the files of the other hosts\n";
}

std::string without_number(const std::string& call) {
  const size_t space = call.find(' ');
  return call.starts_with('#') && space != std::string::npos ? call.substr(space + 1) : call;
}

std::string state_of(const Member& member, uint64_t sequence) {
  const auto call = member.calls.find(sequence);
  if (call != member.calls.end()) {
    if (call->second->failed) return "failed";
    if (call->second->ended_ns != 0 || sequence <= member.group->ended_sequence) return "done";
    return "in it for " + duration_text(member.seconds_ago(call->second->begun_ns));
  }
  return sequence <= member.group->newest.sequence ? "forgotten" : "not come";
}

// "all_reduce f32[512] sum: done 0-2; not come 3"
std::string call_line(const GroupView& group, uint64_t sequence) {
  std::map<std::string, std::map<std::string, std::vector<int>>> by_call;  // and by state
  for (const Member& member : group.members) {
    const auto call = member.calls.find(sequence);
    const std::string what = call == member.calls.end() ? "" : without_number(call->second->text);
    by_call[what][state_of(member, sequence)].push_back(member.number());
  }
  std::string line;
  for (auto& [what, states] : by_call) {
    line += line.empty() ? "" : " | ";
    line += what;
    const char* comma = what.empty() ? "" : ": ";
    for (auto& [state, ranks] : states) {
      std::sort(ranks.begin(), ranks.end());
      line += comma + ranks_text(ranks) + " " + state;
      comma = ", ";
    }
  }
  return line;
}

void add_calls(std::ostream& out, const GroupView& group, uint64_t focus) {
  const uint64_t begin = focus > kBefore ? focus - kBefore : 1;
  for (uint64_t sequence = begin; sequence <= std::min(focus + kAfter, newest_of(group)); ++sequence) {
    out << (sequence == focus ? "  > #" : "    #") << sequence << " " << call_line(group, sequence) << "\n";
  }
}

void add_lateness(std::ostream& out, const GroupView& group) {
  const Lateness latest = latest_of(group);
  double error = 0;
  for (const Member& member : group.members) error = std::max(error, 1e-9 * double(member.host->clock_error_ns));
  if (latest.rank < 0 || latest.seconds < std::max(kLate, 2 * error)) return;
  out << "  rank " << latest.rank << " is late: " << milliseconds_text(latest.seconds)
      << " after the first in the middle of " << latest.num_calls << " calls, the last to " << latest.num_last << "\n";
}

void add_messages(std::ostream& out, const GroupView& group) {
  for (const Member& member : group.members) {
    for (const CallSeen& call : member.rank->calls) {
      const bool is_open = call.group == member.group->id && call.sequence == 0 && call.ended_ns == 0;
      const bool is_message = call.text.starts_with("send") || call.text.starts_with("recv");
      if (!is_open || !is_message) continue;
      out << "  rank " << member.number() << " has not finished " << call.text << ", called "
          << duration_text(member.seconds_ago(call.issued_ns)) << " before\n";
    }
  }
}

std::vector<int> members_before(const GroupView& group, uint64_t sequence) {
  std::vector<int> behind;
  for (const Member& member : group.members) {
    if (member.group->newest.sequence < sequence) behind.push_back(member.number());
  }
  std::sort(behind.begin(), behind.end());
  return behind;
}

void add_group(std::ostream& out, const GroupView& group) {
  std::vector<int> numbers;
  for (const Member& member : group.members) numbers.push_back(member.number());
  std::sort(numbers.begin(), numbers.end());
  out << "\ngroup " << watch_page::group_text(group.name) << ": " << ranks_text(numbers) << "\n";
  const std::vector<int> unknown = unknown_of(group);
  if (!unknown.empty()) out << "  nothing is known of " << ranks_text(unknown) << " of the group\n";
  const uint64_t difference = first_difference(group);
  const uint64_t newest = newest_of(group);
  if (difference != 0) out << "  the first call that differs is #" << difference << "\n";
  const std::vector<int> behind = members_before(group, newest);
  if (!behind.empty()) {
    out << "  " << ranks_text(behind) << (behind.size() == 1 ? " has" : " have") << " not come to #" << newest << "\n";
  }
  add_lateness(out, group);
  if (newest != 0) add_calls(out, group, difference != 0 ? difference : newest);
  add_messages(out, group);
}

const char* state_name(char state) {
  switch (state) {
    case 'R': return "runs";
    case 'S': return "sleeps";
    case 'T': return "is stopped";
    case 't': return "is held by a debugger";
    case 'D': return "waits for a disk";
    case 'Z':
    case 'X': return "has ended";
    default: return "is in an unknown state";
  }
}

void add_process(std::ostream& out, const RankSeen& rank) {
  const uint64_t num_lost = rank.num_calls - std::min<uint64_t>(rank.num_calls, rank.calls.size());
  out << "rank " << rank.rank << " (pid " << rank.pid << ") " << state_name(rank.state) << ", " << rank.num_calls
      << (rank.num_calls == 1 ? " call" : " calls")
      << (num_lost == 0 ? "" : ", of which the first " + std::to_string(num_lost) + " are forgotten") << "\n";
  std::istringstream lines(rank.stack);
  std::string line;
  for (int i = 0; i < kMostStackLines && std::getline(lines, line); ++i) out << "    " << line << "\n";
  if (std::getline(lines, line)) out << "    ...\n";
}

}  // namespace

std::string page_of(const std::vector<HostSeen>& dumps, const std::vector<std::string>& problems) {
  std::ostringstream out;
  if (!dumps.empty()) add_head(out, dumps);
  for (const std::string& problem : problems) out << problem << "\n";
  for (const HostSeen& host : dumps) add_host(out, host);
  add_missing_ranks(out, dumps);
  for (const GroupView& group : groups_of(dumps)) add_group(out, group);
  out << "\n";
  for (const HostSeen& host : dumps) {
    for (const RankSeen& rank : host.ranks) add_process(out, rank);
  }
  return out.str();
}

}  // namespace serried::debug
