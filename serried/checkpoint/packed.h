// Lists of plain numbers as bytes, for what ranks tell each other.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace serried::checkpoint::detail {

template <class T>
std::string packed(const std::vector<T>& numbers) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::string bytes(numbers.size() * sizeof(T), '\0');
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> unpacked(const std::string& bytes) {
  std::vector<T> numbers(bytes.size() / sizeof(T));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
  return numbers;
}

}  // namespace serried::checkpoint::detail
