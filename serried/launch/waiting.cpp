// From what launchers see to sentences. Ranks are brought together by the names of their groups.
#include "serried/launch/waiting.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "serried/base/call_text.h"

namespace serried::launch {
namespace {

constexpr size_t kMostDetails = 4;
constexpr size_t kMostNames = 16;

struct Member {
  const HostSeen* host;
  const RankSeen* rank;
  const GroupSeen* group;

  int number() const { return group->job_rank >= 0 ? group->job_rank : rank->rank; }
  double seconds_since(int64_t ns) const { return ns >= host->now_ns ? 0 : double(host->now_ns - ns) * 1e-9; }
};
using Members = std::vector<Member>;

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

std::map<std::string, Members> members_by_group(const std::vector<HostSeen>& hosts) {
  std::map<std::string, Members> result;
  for (const HostSeen& host : hosts) {
    for (const RankSeen& rank : host.ranks) {
      for (const GroupSeen& group : rank.groups) {
        if (!group.closed) result[group.name].push_back({&host, &rank, &group});
      }
    }
  }
  return result;
}

bool is_collective(const CallSeen& call) {
  return call.sequence != 0;
}

const CallSeen* open_collective(const GroupSeen& group) {
  return !group.open.empty() && is_collective(group.open.front()) ? &group.open.front() : nullptr;
}

std::string numbers_text(const std::vector<std::string>& names) {
  std::string text = names.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() <= kMostNames ? text : text + " and " + std::to_string(names.size() - kMostNames) + " more";
}

// "and is stopped (T)"
std::string state_text(const RankSeen& rank) {
  switch (rank.state) {
    case 'T': return "is stopped (T)";
    case 't': return "is held by a debugger (t)";
    case 'D': return "waits for a disk (D)";
    case 'R': return "runs (R)";
    case 'S': return "sleeps (S)";
    case 'Z':
    case 'X': return "has ended";
    default: return "";
  }
}

// It may wait somewhere else, which is then the reason.
std::string elsewhere_text(const Member& member) {
  for (const GroupSeen& group : member.rank->groups) {
    if (&group == member.group || group.closed || group.open.empty()) continue;
    return "waits in " + group.open.front().text + " of group " + watch_page::group_text(group.name) + " since " +
           seconds_text(member.seconds_since(group.open.front().begun_ns));
  }
  return state_text(*member.rank);
}

// "rank 3 left #182 12.3 s ago and is stopped (T)"
std::string detail_text(const Member& member) {
  const GroupSeen& group = *member.group;
  const CallSeen& newest = group.newest;
  std::string text = "rank " + std::to_string(member.number());
  if (newest.sequence == 0) {
    text += " has made no call there";
  } else if (group.ended_sequence >= newest.sequence) {
    text +=
        " left #" + std::to_string(newest.sequence) + " " + seconds_text(member.seconds_since(group.ended_ns)) + " ago";
  } else {
    text += " is in " + newest.text + " since " + seconds_text(member.seconds_since(newest.begun_ns));
  }
  const std::string doing = elsewhere_text(member);
  return doing.empty() ? text : text + " and " + doing;
}

// Those who are in the call, and those of the group who are not.
struct Split {
  Members waiting;
  Members missing;
  std::vector<int> unknown;  // their numbers in the group
  int num_ahead = 0;         // that wait in a later call
};

Split split_at(const Members& members, uint64_t sequence) {
  Split split;
  std::set<int> known;
  int world_size = 0;
  for (const Member& member : members) {
    known.insert(member.group->rank);
    world_size = std::max(world_size, member.group->world_size);
    const CallSeen* open = open_collective(*member.group);
    if (open != nullptr && open->sequence > sequence) ++split.num_ahead;
    if (open != nullptr && open->sequence == sequence) {
      split.waiting.push_back(member);
    } else if (member.group->newest.sequence < sequence) {
      split.missing.push_back(member);
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (!known.contains(rank)) split.unknown.push_back(rank);
  }
  std::sort(split.missing.begin(), split.missing.end(),
            [](const Member& a, const Member& b) { return a.number() < b.number(); });
  return split;
}

std::string waiting_text(const Split& split, double seconds) {
  const size_t count = split.waiting.size();
  const std::string who = count == 1 ? "rank " + std::to_string(split.waiting.front().number()) + " waits"
                                     : std::to_string(count) + " ranks wait";
  return who + " since " + seconds_text(seconds);
}

std::string missing_text(const Split& split, const std::string& call, double seconds, bool names_hosts) {
  std::vector<std::string> names;
  for (const Member& member : split.missing) {
    names.push_back(std::to_string(member.number()) + (names_hosts ? " (" + member.host->host + ")" : ""));
  }
  for (const int rank : split.unknown) names.push_back(std::to_string(rank) + " of the group");
  const bool one = names.size() == 1;
  std::string text =
      numbers_text(names) + (one ? " has" : " have") + " not come to " + call + "; " + waiting_text(split, seconds);
  for (size_t i = 0; i < std::min(split.missing.size(), kMostDetails); ++i)
    text += "; " + detail_text(split.missing[i]);
  if (split.unknown.empty()) return text;
  std::vector<std::string> unknown;
  for (const int rank : split.unknown) unknown.push_back(std::to_string(rank));
  return text + "; of " + numbers_text(unknown) + " of the group nothing is known";
}

// All are in it: a rank that is stopped in the middle, or a slow transfer.
std::string all_there_text(const Split& split, const std::string& call, double seconds) {
  std::string text = waiting_text(split, seconds) + " in " + call + ", to which all have come";
  for (const Member& member : split.waiting) {
    if (member.rank->state == 'T' || member.rank->state == 't' || member.rank->state == 'Z') {
      text += "; rank " + std::to_string(member.number()) + " " + state_text(*member.rank);
    }
  }
  if (split.num_ahead == 0) return text;
  return text + (split.num_ahead == 1 ? "; 1 rank waits" : "; " + std::to_string(split.num_ahead) + " ranks wait") +
         " in later calls";
}

// Of collectives that last, the first is what the others of this group wait for too.
void add_collective(std::vector<Stall>& stalls, const std::string& name, const Members& members, bool names_hosts) {
  const CallSeen* first = nullptr;
  for (const Member& member : members) {
    const CallSeen* open = open_collective(*member.group);
    if (open != nullptr && (first == nullptr || open->sequence < first->sequence)) first = open;
  }
  if (first == nullptr) return;
  const Split split = split_at(members, first->sequence);
  double seconds = 0;
  for (const Member& member : split.waiting) {
    seconds = std::max(seconds, member.seconds_since(open_collective(*member.group)->begun_ns));
  }
  const std::string call = first->text + (first->part_of.empty() ? "" : " (" + first->part_of + ")");
  const std::string head = "group " + watch_page::group_text(name) + ": ";
  const bool all_there = split.missing.empty() && split.unknown.empty();
  stalls.push_back(
      {head + first->text,
       head + (all_there ? all_there_text(split, call, seconds) : missing_text(split, call, seconds, names_hosts)),
       seconds});
}

const Member* find_member(const Members& members, int group_rank) {
  for (const Member& member : members) {
    if (member.group->rank == group_rank) return &member;
  }
  return nullptr;
}

// "recv f32[4] from rank 1": its peer, as the texts of all calls name it.
int peer_of(const std::string& call) {
  const size_t at = call.rfind(" rank ");
  return at == std::string::npos ? -1 : std::atoi(call.c_str() + at + 6);
}

void add_messages(std::vector<Stall>& stalls, const std::string& name, const Members& members) {
  const std::string head = "group " + watch_page::group_text(name) + ": ";
  for (const Member& member : members) {
    for (const CallSeen& call : member.group->open) {
      if (is_collective(call)) continue;
      const std::string who = "rank " + std::to_string(member.number());
      const double seconds = member.seconds_since(call.begun_ns);
      std::string text = head + who + " waits in " + call.text + " since " + seconds_text(seconds);
      const Member* peer = find_member(members, peer_of(call.text));
      if (peer != nullptr && peer != &member) text += "; " + detail_text(*peer);
      stalls.push_back({head + who + " " + call.text, text, seconds});
    }
  }
}

}  // namespace

std::vector<Stall> find_stalls(const std::vector<HostSeen>& hosts, Seconds slow_after) {
  std::vector<Stall> stalls;
  for (const auto& [name, members] : members_by_group(hosts)) {
    add_collective(stalls, name, members, hosts.size() > 1);
    add_messages(stalls, name, members);
  }
  std::erase_if(stalls, [&](const Stall& stall) { return stall.seconds < slow_after.count(); });
  return stalls;
}

std::vector<std::string> StallLines::update(const std::vector<Stall>& stalls) {
  std::vector<std::string> lines;
  std::set<std::string> seen;
  for (const Stall& stall : stalls) {
    if (!seen.insert(stall.what).second) continue;
    Told& told = told_[stall.what];
    told.seconds = stall.seconds;
    if (stall.seconds < told.next_seconds) continue;
    lines.push_back(stall.text);
    told.next_seconds = 2 * stall.seconds;
  }
  for (auto each = told_.begin(); each != told_.end();) {
    if (seen.contains(each->first)) {
      ++each;
      continue;
    }
    lines.push_back(each->first + " went on after " + seconds_text(each->second.seconds));
    each = told_.erase(each);
  }
  return lines;
}

}  // namespace serried::launch
