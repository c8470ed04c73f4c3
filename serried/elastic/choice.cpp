// The rule by which state wins.
#include "serried/elastic/choice.h"

#include <algorithm>

namespace serried::detail {
namespace {

std::vector<int> ranks_in(const std::vector<Told>& ranks, Condition condition) {
  std::vector<int> found;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].condition == condition) found.push_back(int(rank));
  }
  return found;
}

}  // namespace

Choice choose(const std::vector<Told>& ranks) {
  std::vector<int> candidates = ranks_in(ranks, Condition::whole);
  Choice choice;
  choice.is_start = candidates.empty() && ranks_in(ranks, Condition::torn).empty();
  if (choice.is_start) candidates = ranks_in(ranks, Condition::fresh);
  for (const int rank : candidates) choice.step = std::max(choice.step, ranks[size_t(rank)].step);
  std::erase_if(candidates, [&](int rank) { return ranks[size_t(rank)].step < choice.step; });
  // Fresh ranks may have begun with different numbers.
  if (choice.is_start) candidates.resize(1);
  choice.sources = candidates;
  if (candidates.empty()) return choice;
  const Told& first = ranks[size_t(candidates[0])];
  for (int rank = 0; rank < int(ranks.size()); ++rank) {
    const Told& each = ranks[size_t(rank)];
    const bool is_source = std::count(candidates.begin(), candidates.end(), rank) > 0;
    const bool may_differ = each.condition == Condition::torn;
    if (!is_source && (may_differ || each.digest != first.digest)) choice.receivers.push_back(rank);
    if (rank != candidates[0] && (may_differ || each.buffers_digest != first.buffers_digest)) {
      choice.buffer_receivers.push_back(rank);
    }
  }
  return choice;
}

}  // namespace serried::detail
