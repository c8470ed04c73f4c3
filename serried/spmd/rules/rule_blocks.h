// Puts a table together from blocks of lines.
#pragma once

#include <initializer_list>

#include "serried/spmd/registry.h"

namespace serried::spmd::detail {

inline RuleTable table(std::string_view family, std::initializer_list<std::vector<RuleEntry>> blocks) {
  RuleTable result{family, {}};
  for (const std::vector<RuleEntry>& block : blocks) {
    result.entries.insert(result.entries.end(), block.begin(), block.end());
  }
  return result;
}

}  // namespace serried::spmd::detail
