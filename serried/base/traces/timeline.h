// What is kept of all events of a job while its files are merged: times, without the texts.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

namespace serried::trace {

/// Microseconds.
struct Interval {
  double begin = 0;
  double end = 0;
};

/// Strings by number.
class Names {
 public:
  uint32_t number_of(const std::string& name);
  const std::string& operator[](uint32_t number) const { return list_[number]; }

 private:
  std::unordered_map<std::string, uint32_t> numbers_;
  std::vector<std::string> list_;
};

/// Which collective it is; all its members have the same.
struct CollectiveId {
  uint32_t group = 0;
  int64_t sequence = 0;
  auto operator<=>(const CollectiveId&) const = default;
};

/// One rank's part of a collective, from its call until it was done.
struct Call {
  CollectiveId id;
  Interval time;
  uint32_t name = 0;
  int rank = 0;
  int tid = 0;
  int64_t group_size = 0;
  int64_t bytes = 0;
  bool has_failed = false;
};

/// A thread that waited for a collective.
struct Wait {
  CollectiveId id;
  Interval time;
  int rank = 0;
};

struct RankTimeline {
  int file = 0;
  bool is_named = false;                                // by an event of its file
  std::map<std::string, std::vector<Interval>> phases;  // "forward", ...; "communication" is that of collectives
  Interval whole{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  int64_t bytes = 0;  // that it gave to collectives
};

struct Timeline {
  Names groups;
  Names names;
  std::vector<Call> calls;
  std::vector<Wait> waits;
  std::map<int, RankTimeline> ranks;

  /// Takes an event of the file number `file`, whose times are `offset` behind. The rank it is of; -1: none.
  int add(const nlohmann::json& event, int file, double offset);

  /// Moves all that a rank has done.
  void shift(const std::map<int, double>& by_rank);
};

/// Sorted, and joined where they touch.
std::vector<Interval> joined(std::vector<Interval> intervals);
/// The time in a list that `joined` has made.
double length_of(const std::vector<Interval>& intervals);
/// The time that is in both of two such lists.
double common_length(const std::vector<Interval>& a, const std::vector<Interval>& b);

}  // namespace serried::trace
