// The rule tables, one per family of ops, and what they are put together with.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "serried/spmd/registry.h"

namespace serried::spmd {

RuleTable pointwise_rules();
RuleTable contraction_rules();
RuleTable linalg_rules();
RuleTable norm_rules();
RuleTable attention_rules();
RuleTable conv_rules();
RuleTable pooling_rules();
RuleTable loss_rules();
RuleTable optim_rules();
RuleTable view_rules();
RuleTable reduction_rules();
RuleTable index_rules();
RuleTable shape_rules();
RuleTable sort_rules();
RuleTable like_rules();
RuleTable fft_rules();

namespace detail {

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

/// A table of several lists.
inline RuleTable table(std::string_view family, std::initializer_list<std::vector<RuleEntry>> blocks) {
  return {family, joined(blocks)};
}

}  // namespace detail

}  // namespace serried::spmd
