// Hooks of fix-ups that have a file of their own.
#pragma once

#include "serried/spmd/fixups.h"

namespace serried::spmd::detail {

/// pick v: input 0 is the table, cut along v; the argument called index, indices or target says what to look up. Makes
/// the indices local; those of other ranks become 0 and are remembered until `mask_results` of the same call.
void shift_indices(const LocalCall& local, const FixupPattern& pattern, torch::jit::Stack& arguments);

/// Zeroes what was looked up for indices of other ranks: the results are a sum over ranks then.
void mask_results(const LocalCall& local, const FixupPattern& pattern, const torch::jit::Stack& arguments,
                  torch::jit::Stack& results);

}  // namespace serried::spmd::detail
