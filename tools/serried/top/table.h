// A snapshot as text: as wide and as high as the window, or as JSON.
#pragma once

#include <string>
#include <vector>

#include "tools/serried/top/snapshot.h"

namespace serried::top {

struct TableOptions {
  size_t width = 80;
  size_t height = 0;  // 0: all lines
  bool coloured = false;
};

/// Lines without newlines, none wider than the width. Narrow windows lose columns and the ends of calls, low ones the
/// ranks that least need a look.
std::vector<std::string> table_of(const Snapshot& snapshot, const TableOptions& options);

/// One object; numbers that are not known are null.
std::string json_of(const Snapshot& snapshot);

}  // namespace serried::top
