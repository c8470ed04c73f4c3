// From events to times.
#include "serried/base/traces/timeline.h"

#include <algorithm>
#include <cmath>

#include "serried/base/traces/reader.h"

namespace serried::trace {
namespace {

using nlohmann::json;

// What is more is a mistake of whoever wrote the file.
constexpr int64_t kMostPids = 1 << 20;
constexpr int64_t kMostBytes = int64_t{1} << 40;
constexpr double kMostMicroseconds = 1e15;

double time_in(const json& event, const char* key) {
  const double time = number_in(event, key, 0);
  return std::abs(time) < kMostMicroseconds ? time : 0;
}

}  // namespace

uint32_t Names::number_of(const std::string& name) {
  const auto [found, is_new] = numbers_.try_emplace(name, uint32_t(list_.size()));
  if (is_new) list_.push_back(name);
  return found->second;
}

int Timeline::add(const json& event, int file, double offset) {
  const int64_t pid = integer_in(event, "pid", -1);
  if (pid < 0 || pid >= kMostPids) return -1;
  const int rank = int(pid);
  const auto [found, is_new] = ranks.try_emplace(rank);
  RankTimeline& mine = found->second;
  if (is_new) mine.file = file;
  const std::string kind = text_in(event, "ph");
  if (kind == "M" && text_in(event, "name") == "process_name") mine.is_named = true;
  if (kind != "X") return rank;
  const double begin = time_in(event, "ts") + offset;
  const Interval time{begin, begin + std::max(0.0, time_in(event, "dur"))};
  mine.whole = {std::min(mine.whole.begin, time.begin), std::max(mine.whole.end, time.end)};
  const std::string phase = text_in(event, "cat");
  static const json kNone = json::object();
  const auto found_args = event.find("args");
  const json& args = found_args == event.end() ? kNone : *found_args;
  const std::string group = text_in(args, "group");
  if (phase == "communication" && group.empty()) return rank;  // around collectives, not one itself
  mine.phases[phase].push_back(time);
  if (group.empty()) return rank;
  const CollectiveId id{groups.number_of(group), integer_in(args, "sequence", 0)};
  if (phase == "wait") waits.push_back({id, time, rank});
  if (phase != "communication") return rank;
  const int64_t bytes = std::clamp<int64_t>(integer_in(args, "bytes", 0), 0, kMostBytes);
  mine.bytes += bytes;
  calls.push_back({id, time, names.number_of(text_in(event, "name")), rank, int(integer_in(event, "tid", 0)),
                   integer_in(args, "group_size", 0), bytes, args.contains("failed")});
  return rank;
}

void Timeline::shift(const std::map<int, double>& by_rank) {
  const auto move = [&](int rank, Interval& time) {
    const auto found = by_rank.find(rank);
    if (found != by_rank.end()) time = {time.begin + found->second, time.end + found->second};
  };
  for (Call& call : calls) move(call.rank, call.time);
  for (Wait& wait : waits) move(wait.rank, wait.time);
  for (auto& [rank, timeline] : ranks) {
    move(rank, timeline.whole);
    for (auto& [phase, times] : timeline.phases) {
      for (Interval& time : times) move(rank, time);
    }
  }
}

std::vector<Interval> joined(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<Interval> result;
  for (const Interval& each : intervals) {
    if (!result.empty() && each.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, each.end);
    } else {
      result.push_back(each);
    }
  }
  return result;
}

double length_of(const std::vector<Interval>& intervals) {
  double sum = 0;
  for (const Interval& each : intervals) sum += each.end - each.begin;
  return sum;
}

double common_length(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    if (a[i].end < b[j].end) {
      ++i;
    } else {
      ++j;
    }
  }
  return sum;
}

}  // namespace serried::trace
