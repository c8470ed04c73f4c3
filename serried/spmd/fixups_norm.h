// What fixups_norm.cpp adds to the table of fix-ups.
#pragma once

#include "serried/spmd/fixups.h"

namespace serried::spmd::detail {

/// `group_norm`: the argument N becomes the local batch size. Static.
void set_group_norm_batch(const LocalCall& local, const FixupPattern& pattern, torch::jit::Stack& arguments);

/// `mean_share`: the first result, divided by the local count of `self`, becomes one divided by the global count.
void weigh_share(const LocalCall& local, const FixupPattern& pattern, const torch::jit::Stack& arguments,
                 torch::jit::Stack& results);

}  // namespace serried::spmd::detail
