// One line each, in that order.
#include "serried/graph/record/notice.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::graph {

std::string Notice::text() const {
  std::string text = call + "\n" + status;
  for (const std::string& line : lines) text += "\n" + line;
  return text;
}

Notice parse_notice(int rank, std::string_view text) {
  const std::vector<std::string_view> parts = c10::split(text, '\n');
  if (parts.size() >= 2) {
    Notice notice{std::string(parts[0]), std::string(parts[1]), {parts.begin() + 2, parts.end()}};
    if (notice.text() == text) return notice;
  }
  raise<c10::DistBackendError>({"capture",
                                c10::str("rank ", rank, " left \"", text, "\" in the store, which is no notice"),
                                "find out who else writes to the store of this job"});
}

}  // namespace serried::graph
