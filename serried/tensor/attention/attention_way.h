// How the ranks that hold parts of a sequence come to attend to all of it.
#pragma once

#include <cstdint>
#include <string_view>

namespace serried {

enum class AttentionWay : uint8_t {
  automatic,  // the one that moves least; of gather and ring, which move the same, ring where keys and values are large
  heads,      // queries, keys and values change from parts of the sequence to parts of the heads, and results back
  gather,     // every rank gets all keys and values
  ring,       // keys and values go round from rank to rank while each computes with those it has
};

/// "automatic", "heads", "gather", "ring"
std::string_view to_string(AttentionWay way);

}  // namespace serried
