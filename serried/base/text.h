// Texts in reports and pictures.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

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

/// `text` with all that is no plain letter as '?': names from files and other processes hold anything, escape sequences
/// for a terminal too.
inline std::string printable(std::string_view text) {
  std::string result(text);
  for (char& letter : result) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  return result;
}

/// `text` inside HTML and SVG: with < > & " replaced.
inline std::string escaped(std::string_view text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '&': result += "&amp;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

}  // namespace serried::detail
