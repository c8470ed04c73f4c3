// What messages between hosts are told apart by.
#pragma once

#include <cstdint>

namespace serried::hierarchical {

enum class Purpose : uint64_t { arrival = 1, data = 2, news = 3, envelope = 4, payload = 5, ready = 6, receipt = 7 };

/// A tag has a purpose, the number of a collective, and which step of it.
inline constexpr int kPurposeShift = 44;

inline uint64_t make_tag(Purpose purpose, uint64_t sequence = 0, uint64_t step = 0) {
  return uint64_t(purpose) << kPurposeShift | (sequence & 0xfffffff) << 16 | (step & 0xffff);
}

/// The same tag for another purpose.
inline uint64_t with_purpose(Purpose purpose, uint64_t tag) {
  return uint64_t(purpose) << kPurposeShift | (tag & ((uint64_t(1) << kPurposeShift) - 1));
}

}  // namespace serried::hierarchical
