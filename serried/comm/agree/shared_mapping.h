// Shared files as memory of this process: each is mapped once, however many of the threads are ranks.
#pragma once

#include <cstdint>
#include <memory>

namespace serried::detail {

/// The `bytes` of the file `fd`, which may be closed after this; null with errno set where they cannot be mapped. All
/// who map one file hold the same memory, until the last of them lets go: ranks that are threads take one range of
/// addresses between them, and a race detector, which goes by addresses, sees that they synchronise there.
std::shared_ptr<char> map_shared_file(int fd, int64_t bytes);

/// Zeros of this process alone, taken on use; null with errno set.
std::shared_ptr<char> map_private_zeros(int64_t bytes);

}  // namespace serried::detail
