// Tables of text whose columns stand under each other.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace serried::detail {

using TextRow = std::vector<std::string>;

/// One line per row, cells from the left, two blanks between columns, none at the end of a line.
inline std::string columns(const std::vector<TextRow>& rows, const std::string& indent = "") {
  std::vector<size_t> widths;
  for (const TextRow& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const TextRow& row : rows) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - row[i].size() + (i + 1 < row.size() ? 2 : 0), ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace serried::detail
