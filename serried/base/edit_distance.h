// How alike two words are, for messages about names that do not exist.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string_view>
#include <vector>

namespace serried::detail {

/// How many letters have to be changed, added or left out to come from one word to the other.
inline size_t edit_distance(std::string_view word, std::string_view other) {
  std::vector<size_t> row(other.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 0; i < word.size(); ++i) {
    size_t corner = row[0]++;
    for (size_t j = 0; j < other.size(); ++j) {
      const size_t changed = corner + (word[i] == other[j] ? 0 : 1);
      corner = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace serried::detail
