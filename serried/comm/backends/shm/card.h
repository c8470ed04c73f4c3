// What a rank tells the others before they share memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "serried/comm/agree/shared_file.h"

namespace serried::shm {

struct Card {
  detail::SharedFilePlace memory;  // of the segment; fd -1 where the rank has none
  int64_t heap_bytes = 0;          // per rank
  int64_t round_bytes = 0;         // see SegmentShape
  std::string host;

  std::string text() const;
  bool operator==(const Card&) const = default;
};

/// Heaps above this are a mistake: 16 TiB per rank, and sums of 512 of them fit in 63 bits.
inline constexpr int64_t kMaxHeapBytes = int64_t(1) << 44;

/// What `Card::text` of rank `rank` gave; DistBackendError for anything else, so that what strangers write is told
/// from a rank. `where` is the backend.
Card parse_card(std::string_view where, int rank, const std::string& text);

}  // namespace serried::shm
