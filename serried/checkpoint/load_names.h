// Names that a load finds on one side only.
#pragma once

#include <string>
#include <vector>

#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {

/// "a, b, and 5 more"; "none".
std::string list_of_names(std::vector<std::string> names);

/// Failure with both lists where `strict` and there are any.
void check_names(const std::string& entry, const Wanted& wanted, bool strict);

}  // namespace serried::checkpoint::detail
