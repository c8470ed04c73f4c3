// What a score says: totals, the overloads that are not right, and how they compare with PyTorch's.
#pragma once

#include <iosfwd>
#include <map>
#include <string>

#include "tests/conformance/scorer.h"

namespace serried::testing {

struct Counts {
  int64_t combinations = 0;
  int64_t right = 0;
  int64_t raises = 0;
  int64_t wrong = 0;
  int64_t defaults = 0;  // took the replicate default, whatever came of it
  bool fully_right() const { return right == combinations; }
  double default_percent() const;
};

using CountsByOverload = std::map<std::string, Counts>;

CountsByOverload count(const Score& score);
Counts total(const CountsByOverload& counts);

/// Lines "overload combinations right raises wrong"; "#" begins a comment.
CountsByOverload read_counts(const std::string& path);

/// Overloads of which fewer combinations are right than in `reference`.
std::vector<std::string> worse_than(const CountsByOverload& reference, const CountsByOverload& counts);

/// Limits that a score must keep.
inline constexpr int64_t kMaxWrong = 0;
inline constexpr int64_t kMaxRaises = 0;
inline constexpr double kMaxDefaultPercent = 10;
bool keeps_limits(const Counts& totals);

/// A table of all overloads that are not fully right or took the default, then the totals.
void print_table(std::ostream& out, const CountsByOverload& counts, const CountsByOverload& reference);

/// One line per trial of that kind: "raises", "wrong" or "default".
void print_list(std::ostream& out, const Score& score, const std::string& kind);

void write_json(const std::string& path, const CountsByOverload& counts);

}  // namespace serried::testing
