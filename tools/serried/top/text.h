// Small texts of `serried top`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "serried/base/text.h"

namespace serried::top {

using detail::printable;

/// "0-5, 9", of numbers that ascend; "" of none.
inline std::string list_text(const std::vector<int>& numbers) {
  std::string text;
  for (size_t begin = 0, end = 0; begin < numbers.size(); begin = end) {
    for (end = begin + 1; end < numbers.size() && numbers[end] == int64_t(numbers[end - 1]) + 1;) ++end;
    if (end == begin + 2) --end;  // two are listed: "1, 2"
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[begin]);
    if (end > begin + 1) text += "-" + std::to_string(numbers[end - 1]);
  }
  return text;
}

/// "rank 3", "ranks 0-5, 9"
inline std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + list_text(ranks);
}

/// "0.4 s", "12 s", "5 min", "2.5 h", "3 d": at most seven letters.
inline std::string duration_text(double seconds) {
  char text[32];
  if (!(seconds > 0)) seconds = 0;
  if (seconds > 3.6e9) seconds = 3.6e9;
  if (seconds < 9.95)
    std::snprintf(text, sizeof text, "%.1f s", seconds);
  else if (seconds < 99.5)
    std::snprintf(text, sizeof text, "%.0f s", seconds);
  else if (seconds < 5970)
    std::snprintf(text, sizeof text, "%.0f min", seconds / 60);
  else if (seconds < 99.5 * 3600)
    std::snprintf(text, sizeof text, "%.1f h", seconds / 3600);
  else
    std::snprintf(text, sizeof text, "%.0f d", seconds / 86400);
  return text;
}

/// "12.3", "1230": a rate in at most six letters; "-" where it is not known.
inline std::string rate_text(double rate) {
  if (!(rate >= 0)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, rate < 99.95 ? "%.1f" : rate < 999999.5 ? "%.0f" : "%.0e", rate);
  return text;
}

/// "512B", "1.5K", "300M", "2.0G": as short as it can be.
inline std::string short_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "K", "M", "G", "T"};
  double amount = double(bytes < 0 ? 0 : bytes);
  size_t unit = 0;
  for (; amount >= 999.5 && unit + 1 < std::size(kUnits); ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit > 0 && amount < 9.95 ? "%.1f%s" : "%.0f%s", amount, kUnits[unit]);
  return text;
}

}  // namespace serried::top
