// The sentences below the table: who waits for whom, and what to do about it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tools/serried/top/snapshot.h"

namespace serried::top {

/// `failures`: why groups have failed, by name. `problems`: why the memory of a rank cannot be read, by rank.
std::vector<std::string> notes_of(const Snapshot& snapshot, const std::map<std::string, std::string>& failures,
                                  const std::map<int, std::string>& problems);

}  // namespace serried::top
