// Spelling rules at run time: fresh letters, dims, slots.
#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace serried::spmd::detail {

/// The dims of one slot, a text each.
using Dims = std::vector<std::string>;

/// Hands out letters, each once; when they run out whole dims share one, which is allowed as they are never cut.
class Letters {
 public:
  /// A fresh factor that may be cut.
  std::string cut() { return next_ > 'y' ? whole() : std::string(1, next_++); }
  /// A fresh factor that is whole on every rank.
  std::string whole() { return std::string(1, char((next_ > 'y' ? 'z' : next_++) - 'a' + 'A')); }

  /// `ndim` dims, of which those in `whole_dims` are whole.
  Dims dims(int64_t ndim, c10::IntArrayRef whole_dims = {}) {
    Dims result;
    for (int64_t d = 0; d < ndim; ++d) {
      const bool is_whole = std::find(whole_dims.begin(), whole_dims.end(), d) != whole_dims.end();
      result.push_back(is_whole ? whole() : cut());
    }
    return result;
  }
  Dims wholes(int64_t ndim) {
    Dims result;
    for (int64_t d = 0; d < ndim; ++d) result.push_back(whole());
    return result;
  }

  /// The text of a slot. More dims than a slot has room for make the rule fall away, see `finish`.
  std::string slot(const Dims& dims) {
    fits_ = fits_ && dims.size() <= kMostDims;
    std::string text;
    for (const std::string& dim : dims) text += dim;
    return text;
  }

  /// The rule, or nothing where a slot was too long: such calls take the replicate default.
  std::string finish(std::string text) const { return fits_ ? text : std::string(); }

 private:
  static constexpr size_t kMostDims = 8;
  char next_ = 'a';
  bool fits_ = true;
};

/// `dims` without those at `places`, and with `added` put at `place`.
inline Dims without(const Dims& dims, c10::IntArrayRef places) {
  Dims result;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (std::find(places.begin(), places.end(), int64_t(d)) == places.end()) result.push_back(dims[d]);
  }
  return result;
}
inline Dims with(Dims dims, int64_t place, const std::string& added) {
  dims.insert(dims.begin() + std::min<int64_t>(place, int64_t(dims.size())), added);
  return dims;
}

}  // namespace serried::spmd::detail
