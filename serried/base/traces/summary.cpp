// Adds up the times of ranks and collectives.
#include "serried/base/traces/summary.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <tuple>

#include "serried/base/text.h"

namespace serried::trace {
namespace {

using serried::detail::bytes_text;

RankSummary summary_of(int rank, const RankTimeline& timeline) {
  const auto times = [&](const char* phase) {
    const auto found = timeline.phases.find(phase);
    return found == timeline.phases.end() ? std::vector<Interval>() : joined(found->second);
  };
  const std::vector<Interval> waits = times("wait");
  const auto own_time = [&](const char* phase) {
    const std::vector<Interval> all = times(phase);
    return length_of(all) - common_length(all, waits);
  };
  const std::vector<Interval> communication = times("communication");
  return {.rank = rank,
          .whole = std::max(0.0, timeline.whole.end - timeline.whole.begin),
          .forward = own_time("forward"),
          .backward = own_time("backward"),
          .optimizer = own_time("optimizer"),
          .communication = length_of(communication),
          .waiting = length_of(waits),
          .hidden = own_time("communication"),
          .bytes = timeline.bytes};
}

// How long each rank waited for the last one, by collective: while it could do nothing else, and the last had not come.
class Waiting {
 public:
  explicit Waiting(std::vector<Wait> waits) : waits_(std::move(waits)) {
    std::sort(waits_.begin(), waits_.end(), by_id);
  }

  double for_last_of(const Collective& collective) const {
    const Call& last = collective.last();
    double sum = 0;
    const auto [begin, end] = std::equal_range(waits_.begin(), waits_.end(), Wait{last.id, {}, 0}, by_id);
    for (auto wait = begin; wait != end; ++wait) {
      if (wait->rank != last.rank) sum += std::max(0.0, std::min(wait->time.end, last.time.begin) - wait->time.begin);
    }
    return sum;
  }

 private:
  static bool by_id(const Wait& a, const Wait& b) { return a.id < b.id; }

  std::vector<Wait> waits_;
};

// What is added up for collectives of one name.
struct Sums {
  CollectiveSummary summary;
  std::map<int, int64_t> num_last;  // per rank
};

double time_of(const Collective& collective) {
  double most = 0;
  for (const Call& call : collective.calls) most = std::max(most, call.time.end - call.time.begin);
  return most;
}

// "12.3 s", "4.5 ms"
std::string time_text(double microseconds) {
  std::array<char, 32> text{};
  if (microseconds >= 1e6) {
    std::snprintf(text.data(), text.size(), "%.2f s", microseconds / 1e6);
  } else if (microseconds >= 1e3) {
    std::snprintf(text.data(), text.size(), "%.1f ms", microseconds / 1e3);
  } else {
    std::snprintf(text.data(), text.size(), "%.0f us", microseconds);
  }
  return text.data();
}

std::string percent_text(double part, double whole) {
  return whole > 0 ? std::to_string(int(100 * part / whole + 0.5)) + " %" : "-";
}

using Row = std::vector<std::string>;

// Columns as wide as they need to be; all but the `num_left` first are aligned to the right.
std::string table_text(const std::vector<Row>& rows, size_t num_left) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i < num_left ? row[i] + space : space + row[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string ranks_text(const std::vector<RankSummary>& ranks) {
  constexpr size_t kMostRanks = 64;
  std::vector<Row> rows{
      {"rank", "time", "forward", "backward", "optimizer", "communication", "hidden", "waiting", "bytes"}};
  for (const RankSummary& r : ranks) {
    if (rows.size() > kMostRanks) break;
    rows.push_back({std::to_string(r.rank), time_text(r.whole), time_text(r.forward), time_text(r.backward),
                    time_text(r.optimizer), time_text(r.communication), percent_text(r.hidden, r.communication),
                    time_text(r.waiting), bytes_text(r.bytes)});
  }
  std::string text = table_text(rows, 0);
  if (ranks.size() > kMostRanks) text += "and " + std::to_string(ranks.size() - kMostRanks) + " more ranks\n";
  return text;
}

std::string collectives_text(const std::vector<CollectiveSummary>& collectives) {
  constexpr size_t kMostNames = 10;
  std::vector<Row> rows{{"collective", "calls", "bytes", "time", "waiting", "last"}};
  for (const CollectiveSummary& c : collectives) {
    if (rows.size() > kMostNames) break;
    rows.push_back(
        {detail::printable(c.name), std::to_string(c.num_calls), bytes_text(c.bytes), time_text(c.time),
         time_text(c.waiting),
         "rank " + std::to_string(c.last_rank) + " in " + percent_text(double(c.num_last), double(c.num_calls))});
  }
  std::string text = table_text(rows, 1);
  if (collectives.size() > kMostNames) text += "and " + std::to_string(collectives.size() - kMostNames) + " more\n";
  return text;
}

}  // namespace

Summary summarise(const Timeline& timeline, const std::vector<Collective>& collectives) {
  Summary summary;
  for (const auto& [rank, times] : timeline.ranks) summary.ranks.push_back(summary_of(rank, times));
  const Waiting waiting(timeline.waits);
  std::map<uint32_t, Sums> by_name;
  std::map<int, LateRank> by_rank;
  for (const Collective& collective : collectives) {
    if (!collective.is_whole) continue;
    const Call& last = collective.last();
    const double waited = waiting.for_last_of(collective);
    Sums& sums = by_name[last.name];
    sums.summary.num_calls += 1;
    sums.summary.bytes += last.bytes;
    sums.summary.time += time_of(collective);
    sums.summary.waiting += waited;
    sums.num_last[last.rank] += 1;
    LateRank& late = by_rank[last.rank];
    late = {last.rank, late.num_last + 1, late.waited + waited};
    ++summary.num_collectives;
  }
  for (auto& [name, sums] : by_name) {
    sums.summary.name = timeline.names[name];
    const auto most = std::max_element(sums.num_last.begin(), sums.num_last.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    std::tie(sums.summary.last_rank, sums.summary.num_last) = *most;
    summary.collectives.push_back(std::move(sums.summary));
  }
  std::stable_sort(summary.collectives.begin(), summary.collectives.end(), [](const auto& a, const auto& b) {
    return std::tie(a.waiting, a.time) > std::tie(b.waiting, b.time);
  });
  for (const auto& [rank, late] : by_rank) {
    if (late.waited > summary.latest.waited) summary.latest = late;
  }
  return summary;
}

std::string to_text(const Summary& summary) {
  std::string text = ranks_text(summary.ranks);
  if (!summary.collectives.empty()) text += "\n" + collectives_text(summary.collectives);
  const LateRank& latest = summary.latest;
  if (latest.rank < 0) return text;
  return text + "\nrank " + std::to_string(latest.rank) + " came last in " +
         percent_text(double(latest.num_last), double(summary.num_collectives)) + " of " +
         std::to_string(summary.num_collectives) + " collectives; the others waited " + time_text(latest.waited) +
         " for it\n";
}

}  // namespace serried::trace
