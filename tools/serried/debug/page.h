// Dumps of all hosts on one page: what differs, who is missing, who is late.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/seen.h"

namespace serried::debug {

/// Lines for a terminal. `problems`: files that are no dumps.
std::string page_of(const std::vector<launch::HostSeen>& dumps, const std::vector<std::string>& problems);

}  // namespace serried::debug
