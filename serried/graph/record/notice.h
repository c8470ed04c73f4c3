// What a rank says of one recording to the others.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace serried::graph {

struct Notice {
  std::string call;                // the number of the call that was recorded
  std::string status;              // how that ended
  std::vector<std::string> lines;  // its collectives; none of them holds a line break

  std::string text() const;
  bool operator==(const Notice&) const = default;
};

/// What `Notice::text` of rank `rank` gave; DistBackendError for anything else.
Notice parse_notice(int rank, std::string_view text);

}  // namespace serried::graph
