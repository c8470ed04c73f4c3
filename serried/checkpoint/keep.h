// Which older checkpoints stay after a save; see SaveOptions.
#pragma once

#include <string>

#include "serried/checkpoint/checkpoint.h"

namespace serried::checkpoint::detail {

/// Failure for numbers of checkpoints to keep that are none.
void check_keep(const SaveOptions& options);

/// Removes those beside `path` that need not stay.
void remove_older(const std::string& path, const SaveOptions& options);

}  // namespace serried::checkpoint::detail
