// The first host of a list as Slurm writes it. Free of LibTorch: the launcher uses it too.
#pragma once

#include <algorithm>
#include <string>

namespace serried::detail {

/// "node[01-03,07],gpu1" -> "node01"
inline std::string first_host(const std::string& nodelist) {
  const size_t open = nodelist.find_first_of("[,");
  if (open == std::string::npos || nodelist[open] == ',') return nodelist.substr(0, open);
  const size_t end = nodelist.find_first_of("-,]", open + 1);
  const size_t close = std::min(nodelist.find(']', open), nodelist.size());
  const size_t tail = std::min(close + 1, nodelist.size());
  const size_t tail_end = std::min(nodelist.find(',', tail), nodelist.size());
  return nodelist.substr(0, open) + nodelist.substr(open + 1, end - open - 1) + nodelist.substr(tail, tail_end - tail);
}

}  // namespace serried::detail
