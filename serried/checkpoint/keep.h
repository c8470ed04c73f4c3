// Which older checkpoints stay after a save; see SaveOptions.
#pragma once

#include <cstdint>
#include <string>

#include "serried/checkpoint/checkpoint.h"

namespace serried::checkpoint::detail {

/// Failure for numbers of checkpoints to keep that are none.
void check_keep(const SaveOptions& options);

/// When a checkpoint that is saved to `path` now is saved, in nanoseconds since 1970: after all that are beside it,
/// also where the clock was set back, or where rank 0 is on another host than before.
int64_t time_of_save(const std::string& path);

/// Removes those beside `path` that need not stay.
void remove_older(const std::string& path, const SaveOptions& options);

}  // namespace serried::checkpoint::detail
