// How amounts of memory read in reports.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace serried::detail {

/// "512 B", "1.5 KiB", "2.0 GiB"
inline std::string bytes_text(int64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  double amount = double(bytes) / 1024;
  int unit = 0;
  while (amount >= 1024 && unit < 3) {
    amount /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", amount, kUnits[unit]);
  return text;
}

}  // namespace serried::detail
