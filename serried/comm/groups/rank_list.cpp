// Three or more ranks in a row become a range.
#include "serried/comm/groups/rank_list.h"

#include <c10/util/StringUtil.h>

namespace serried::detail {

std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    text += text.empty() ? "" : ", ";
    text += end - i < 3 ? c10::str(ranks[i]) : c10::str(ranks[i], "-", ranks[end - 1]);
    i = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace serried::detail
