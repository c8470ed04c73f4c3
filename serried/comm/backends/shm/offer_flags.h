// What an Offer says about itself.
#pragma once

#include <cstdint>

namespace serried::shm {

enum OfferFlag : uint32_t {
  kInSlot = 1,      // the bytes lie in the rank's slot; `address` is unused
  kInPlace = 2,     // the bytes lie where `address` says: the rank must not go on before all have read
  kInStage = 4,     // the bytes come chunk by chunk through the stage
  kOnePerPeer = 8,  // peer p takes the p-th run of `extent` bytes
  kInTable = 16,    // each peer's piece is in the rank's table
};

}  // namespace serried::shm
