// Small helpers for tables and for rules that are written call by call.
#pragma once

#include <string>
#include <vector>

#include "serried/spmd/registry.h"

namespace serried::spmd::detail {

/// `count` letters from `first` on: letters('P', 3) is "PQR".
inline std::string letters(char first, int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += char(first + i);
  return text;
}

/// Several lists as one.
inline std::vector<RuleEntry> joined(std::initializer_list<std::vector<RuleEntry>> lists) {
  std::vector<RuleEntry> result;
  for (const std::vector<RuleEntry>& list : lists) result.insert(result.end(), list.begin(), list.end());
  return result;
}

}  // namespace serried::spmd::detail
