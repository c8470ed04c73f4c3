// The ranks that save or load together: they share texts, and where one fails all do.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::checkpoint::detail {

class Ranks {
 public:
  /// Null: this process alone.
  explicit Ranks(Group group) : group_(std::move(group)) {}

  int rank() const { return group_ ? group_->getRank() : 0; }
  int size() const { return group_ ? group_->getSize() : 1; }
  bool is_first() const { return rank() == 0; }
  const Group& group() const { return group_; }

  /// What `step` returns on each rank, in rank order. Where it fails on some rank, every rank gets a Failure with the
  /// text of the first of these. `step` calls no collectives that a failure would keep it from.
  std::vector<std::string> together(const std::function<std::string()>& step) const;

  /// What the ranks have for this one, in rank order, one after the other; `for_ranks`: what this one has for each. All
  /// ranks call it.
  std::vector<int64_t> deal(const std::vector<std::vector<int64_t>>& for_ranks) const;

  /// Failure on all ranks that shows where texts of two of them differ first, line by line.
  void compare(const std::string& mine) const;

 private:
  Group group_;
};

}  // namespace serried::checkpoint::detail
