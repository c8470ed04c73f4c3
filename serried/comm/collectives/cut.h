// How a dim is cut over ranks: the same cut as Shard's.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace serried::detail {

/// Sizes per rank: ceil(size / num_ranks) each, the last ranks less or nothing.
///     shard_sizes(10, 4)  ->  3 3 3 1        shard_sizes(2, 4)  ->  1 1 0 0
std::vector<int64_t> shard_sizes(int64_t size, int num_ranks);

/// Where each piece begins: the running sum before it.
std::vector<int64_t> offsets_of(c10::IntArrayRef sizes);

int64_t sum_of(c10::IntArrayRef sizes);

/// `sizes` with entry `dim` replaced.
std::vector<int64_t> with_size(c10::IntArrayRef sizes, int64_t dim, int64_t size);

}  // namespace serried::detail
