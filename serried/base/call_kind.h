// What a rank can call of a group, as records of it say: for those who write them and for readers without LibTorch.
#pragma once

#include <cstdint>

namespace serried {

enum class CallKind : uint8_t {
  none,
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  gather,
  scatter,
  broadcast,
  all_to_all,
  barrier,
  send,
  recv,
};

}  // namespace serried
