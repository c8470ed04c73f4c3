// What a rank and its launcher say on the socket between them, and how much of it. Free of LibTorch.
//   rank -> launcher   begin | ask <id> <op> <arguments> | forget <id> | elastic
//   launcher -> rank   answer <id> <outcome> <fields> | over <generation> <why>
//                      leader <address, while the leader is away>
//                      table <generation> <rank> <ranks> <local rank> <local ranks> <node> <nodes>
#pragma once

#include <cstddef>

namespace serried::channel {

/// Names the rank's end, which the launcher opened.
inline constexpr const char* kLineVariable = "SERRIED_LAUNCHER_FD";

/// Of one value in the launcher's store, with its key; of all that a job keeps there; and of the questions that a rank
/// may have open.
inline constexpr size_t kMostBytesOfAValue = 8 << 20;
inline constexpr size_t kMostBytesOfAStore = 1 << 30;
inline constexpr size_t kMostOpenQuestions = 4096;

}  // namespace serried::channel
