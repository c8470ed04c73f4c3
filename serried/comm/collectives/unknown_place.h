// How the newest records of ranks say of one that nobody here knows where it is.
#pragma once

#include <cstdint>

namespace serried::watch {

/// The sequence of such a record.
inline constexpr uint64_t kUnknownPlace = ~uint64_t(0);

}  // namespace serried::watch
