// Text inside HTML and SVG.
#pragma once

#include <string>
#include <string_view>

namespace serried::detail {

/// With < > & " replaced.
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
