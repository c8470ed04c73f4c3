// Texts of any length between ranks.
#pragma once

#include <string>
#include <vector>

#include "serried/comm/group.h"

namespace serried::detail {

/// Every rank's `mine`, in rank order, on every rank.
std::vector<std::string> all_gather_bytes(const std::string& mine, const Group& group);

/// Every rank's `mine`, in rank order, on rank `to`; nothing elsewhere. Each text travels once.
std::vector<std::string> gather_bytes(const std::string& mine, const Group& group, int to);

}  // namespace serried::detail
