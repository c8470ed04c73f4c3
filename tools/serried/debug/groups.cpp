// Bringing calls of one number together.
#include "tools/serried/debug/groups.h"

#include <algorithm>
#include <set>

namespace serried::debug {
namespace {

using launch::CallSeen;
using launch::GroupSeen;
using launch::HostSeen;
using launch::RankSeen;

constexpr size_t kMostCommonCalls = 256;

Member member_of(const HostSeen& host, const RankSeen& rank, const GroupSeen& group) {
  Member member{&host, &rank, &group};
  for (const CallSeen& call : rank.calls) {
    if (call.group == group.id && call.sequence != 0) member.calls[call.sequence] = &call;
  }
  if (group.newest.sequence != 0) member.calls.try_emplace(group.newest.sequence, &group.newest);
  return member;
}

const std::string& agreed(const CallSeen& call) {
  return call.agreed.empty() ? call.text : call.agreed;
}

// The newest first.
std::vector<uint64_t> common_calls(const GroupView& group) {
  std::vector<uint64_t> common;
  if (group.members.size() < 2) return common;
  const auto& first = group.members.front().calls;
  for (auto call = first.rbegin(); call != first.rend() && common.size() < kMostCommonCalls; ++call) {
    const auto has_it = [&](const Member& member) {
      const auto found = member.calls.find(call->first);
      return found != member.calls.end() && found->second->begun_ns != 0;
    };
    if (std::all_of(group.members.begin(), group.members.end(), has_it)) common.push_back(call->first);
  }
  return common;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<GroupView> groups_of(const std::vector<HostSeen>& dumps) {
  std::map<std::string, GroupView> by_name;
  for (const HostSeen& host : dumps) {
    for (const RankSeen& rank : host.ranks) {
      for (const GroupSeen& group : rank.groups) {
        Member member = member_of(host, rank, group);
        if (group.closed && member.calls.empty()) continue;
        GroupView& view = by_name[group.name];
        view.name = group.name;
        view.world_size = std::max(view.world_size, group.world_size);
        view.members.push_back(std::move(member));
      }
    }
  }
  std::vector<GroupView> groups;
  for (auto& [name, view] : by_name) {
    std::stable_sort(view.members.begin(), view.members.end(),
                     [](const Member& a, const Member& b) { return a.group->rank < b.group->rank; });
    groups.push_back(std::move(view));
  }
  return groups;
}

std::vector<int> unknown_of(const GroupView& group) {
  std::set<int> known;
  for (const Member& member : group.members) known.insert(member.group->rank);
  std::vector<int> unknown;
  for (int rank = 0; rank < group.world_size; ++rank) {
    if (!known.contains(rank)) unknown.push_back(rank);
  }
  return unknown;
}

uint64_t first_difference(const GroupView& group) {
  std::map<uint64_t, const std::string*> seen;
  uint64_t first = 0;
  for (const Member& member : group.members) {
    for (const auto& [sequence, call] : member.calls) {
      const auto [known, is_new] = seen.emplace(sequence, &agreed(*call));
      const bool differs = !is_new && *known->second != agreed(*call);
      if (differs && (first == 0 || sequence < first)) first = sequence;
    }
  }
  return first;
}

uint64_t newest_of(const GroupView& group) {
  uint64_t newest = 0;
  for (const Member& member : group.members) newest = std::max(newest, member.group->newest.sequence);
  return newest;
}

Lateness latest_of(const GroupView& group) {
  std::map<int, std::vector<double>> lateness;
  std::map<int, int> num_last;
  const std::vector<uint64_t> common = common_calls(group);
  for (const uint64_t sequence : common) {
    const auto came = [&](const Member& member) { return member.seconds(member.calls.at(sequence)->begun_ns); };
    const auto [first, last] = std::minmax_element(group.members.begin(), group.members.end(),
                                                   [&](const Member& a, const Member& b) { return came(a) < came(b); });
    const double began = came(*first);
    ++num_last[last->number()];
    for (const Member& member : group.members) lateness[member.number()].push_back(came(member) - began);
  }
  Lateness latest;
  for (const auto& [rank, values] : lateness) {
    const double middle = median(values);
    if (latest.rank >= 0 && middle <= latest.seconds) continue;
    latest = {rank, middle, num_last[rank], int(common.size())};
  }
  return latest;
}

}  // namespace serried::debug
