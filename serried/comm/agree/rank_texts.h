// Texts of any length between ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::detail {

/// Every rank's `mine`, in rank order, on every rank.
std::vector<std::string> all_gather_bytes(const std::string& mine, const Group& group);

/// Where rank `rank`'s text first differs from rank 0's; a line is absent where a text has fewer.
struct LineDifference {
  size_t line;
  int rank;
  std::optional<std::string> first, other;
  size_t first_count, other_count;  // lines
};

/// The same on every rank, none where all texts are alike; lines end with '\n'. A hash goes first: the text of a large
/// model is only sent where it is needed.
std::optional<LineDifference> first_difference(const std::string& mine, const Group& group);

/// Every rank's `mine`, in rank order, on rank `to`; nothing elsewhere. Each text travels once.
std::vector<std::string> gather_bytes(const std::string& mine, const Group& group, int to);

}  // namespace serried::detail
