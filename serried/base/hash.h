// A fast hash of words, for tables and fingerprints; not for secrets.
#pragma once

#include <cstdint>

namespace serried {

/// `hash` with `word` mixed in; the order of words counts.
inline uint64_t mix_hash(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
  return hash ^ (hash >> 29);
}

}  // namespace serried
