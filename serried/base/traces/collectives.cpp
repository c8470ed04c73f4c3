// Calls are brought together by sorting: a job has millions of them.
#include "serried/base/traces/collectives.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace serried::trace {
namespace {

bool waits_for_all(const std::string& name) {
  for (const char* kind : {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier"}) {
    if (name.starts_with(kind)) return true;
  }
  return false;
}

// Ranks are in order, so equal ones are neighbours.
bool has_rank_twice(std::span<const Call> calls) {
  return std::adjacent_find(calls.begin(), calls.end(),
                            [](const Call& a, const Call& b) { return a.rank == b.rank; }) != calls.end();
}

// The calls of some ranks in one collective, as far as they bound a clock.
struct Side {
  double last_begin = -std::numeric_limits<double>::infinity();
  double first_end = std::numeric_limits<double>::infinity();

  void add(const Interval& time) {
    last_begin = std::max(last_begin, time.begin);
    first_end = std::min(first_end, time.end);
  }
  bool is_empty() const { return std::isinf(last_begin); }
};

}  // namespace

const Call& Collective::last() const {
  return *std::max_element(calls.begin(), calls.end(),
                           [](const Call& a, const Call& b) { return a.time.begin < b.time.begin; });
}

std::vector<Collective> match(Timeline& timeline) {
  std::vector<Call>& calls = timeline.calls;
  std::sort(calls.begin(), calls.end(),
            [](const Call& a, const Call& b) { return std::tie(a.id, a.rank) < std::tie(b.id, b.rank); });
  std::vector<Collective> found;
  for (auto begin = calls.begin(); begin != calls.end();) {
    const auto end = std::find_if(begin, calls.end(), [&](const Call& call) { return call.id != begin->id; });
    const std::span<const Call> members(begin, end);
    begin = end;
    const Call& first = members.front();
    if (first.id.sequence <= 0 || members.size() < 2 || has_rank_twice(members)) continue;
    if (first.group_size > 0 && int64_t(members.size()) > first.group_size) continue;
    const bool any_failed = std::any_of(members.begin(), members.end(), [](const Call& c) { return c.has_failed; });
    found.push_back({members, int64_t(members.size()) == first.group_size && !any_failed});
  }
  return found;
}

ClockShift find_shift(const Timeline& timeline, const std::vector<Collective>& collectives, const std::set<int>& fixed,
                      const std::set<int>& moved) {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  ClockShift result;
  for (const Collective& collective : collectives) {
    if (!collective.is_whole || !waits_for_all(timeline.names[collective.calls.front().name])) continue;
    Side here, there;
    for (const Call& call : collective.calls) {
      if (fixed.contains(call.rank)) here.add(call.time);
      if (moved.contains(call.rank)) there.add(call.time);
    }
    if (here.is_empty() || there.is_empty()) continue;
    ++result.num_collectives;
    least = std::max(least, here.last_begin - there.first_end);
    most = std::min(most, here.first_end - there.last_begin);
  }
  if (result.num_collectives == 0) return result;
  result.contradicts = least > most;
  result.doubt_us = std::abs(most - least) / 2;
  const bool is_right = least <= 0 && most >= 0;
  result.shift_us = is_right ? 0 : (least + most) / 2;
  return result;
}

}  // namespace serried::trace
