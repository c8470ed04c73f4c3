// Blocks of files that no rank reads all of, compared with their hashes all the same.
#pragma once

#include <cstdint>
#include <vector>

#include "serried/checkpoint/reader.h"

namespace serried::checkpoint::detail {

/// What this rank has to say of blocks that it has read parts of, for each rank: each block is compared by one of them,
/// the same on all ranks. Of each there are the hashes of the leaves that were read, so that nobody reads these again.
std::vector<std::vector<int64_t>> leaves_for_ranks(const Checkpoint& checkpoint, int num_ranks);

/// Compares the blocks of which others, and this rank, have said something; reads of them only what nobody has read.
/// Failure as for TensorFile::read.
void check_blocks_of(Checkpoint& checkpoint, const std::vector<int64_t>& leaves);

}  // namespace serried::checkpoint::detail
