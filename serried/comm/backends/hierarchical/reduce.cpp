// Reductions. In the order of hosts by sums, and some where each rank is a host of its own; in the order of ranks by a
// chain of hosts; where none fits, every contribution goes to the rank that reduces its part.
#include <algorithm>

#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include "serried/comm/backends/hierarchical/chain.h"
#include "serried/comm/backends/hierarchical/chain_to_owners.h"
#include "serried/comm/backends/hierarchical/engine.h"
#include "serried/comm/backends/hierarchical/moves_parts.h"
#include "serried/comm/backends/hierarchical/sums.h"

namespace serried::hierarchical {
namespace {

// How much of other ranks' contributions a rank holds at a time.
constexpr int64_t kContributionBytes = 8 << 20;

constexpr int64_t kMostInParts = 1 << 20;

}  // namespace

/// Where all contributions have come with the arrivals: reduces them, and is true.
bool HierarchicalEngine::reduce_carried(const Op& op, OrderedReduction& reduction, Piece result) {
  std::vector<const char*> contributions;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!carries(peer, op)) return false;
    contributions.push_back(offered(peer, rank(), op).data);
  }
  if (result.bytes > 0) reduction.reduce(result.data, contributions, result.bytes / op.element_bytes);
  return true;
}

void HierarchicalEngine::all_reduce(const Op& op) {
  const int64_t total = op.count * op.element_bytes;
  OrderedReduction reduction(topology_, order_, op);
  if (reduce_carried(op, reduction, {.data = op.output, .bytes = total})) return;
  if (takes_sums(op)) return reduce_by_sums(op, reduction);
  if (takes_chain_) return all_reduce_by_chain(op);
  const int n = world_size();
  const int64_t share = ((total + n - 1) / n + kLine - 1) / kLine * kLine;
  Pieces contributions;
  Pieces results;
  for (int peer = 0; peer < n; ++peer) {
    const int64_t begin = std::min(total, peer * share);
    const int64_t bytes = std::min(share, total - begin);
    contributions.list.push_back({.data = const_cast<char*>(op.input) + begin, .bytes = bytes});
    results.list.push_back({.data = op.output + begin, .bytes = bytes});
  }
  reduce_contributions(op, contributions, results.at(rank()), share);
  move_shared(op, results.at(rank()), results, std::vector<bool>(size_t(n), false));
}

/// Where each rank is a host of its own, sums in the order of ranks are those of hosts, and as many bytes are sent in
/// any case: from some size on fewer waits for each other are worth more than to add while bytes are on their way.
bool HierarchicalEngine::takes_sums(const Op& op) const {
  if (order_ == Order::hosts) return true;
  return topology_.num_hosts() == world_size() && op.kind == Op::Kind::all_reduce &&
         op.count * op.element_bytes <= kMostInParts;
}

void HierarchicalEngine::reduce_by_sums(const Op& op, OrderedReduction& reduction) {
  const MovesParts moves(moves_parts_);
  HostSums(*local_, links_, topology_, op, reduction).run();
}

void HierarchicalEngine::all_reduce_by_chain(const Op& op) {
  const MovesParts moves(moves_parts_);
  Chain(*local_, links_, topology_, op).run();
}

void HierarchicalEngine::reduce_by_chain_to_owners(const Op& op) {
  const MovesParts moves(moves_parts_);
  ChainToOwners(*local_, links_, topology_, op).run();
}

void HierarchicalEngine::reduce_to_owners(const Op& op) {
  const Piece result = op.sinks.at(rank());
  for (int peer = 0; peer < world_size() && result.bytes > 0; ++peer) {
    check_size(peer, offered(peer, rank(), op).bytes, result.bytes, op);
  }
  OrderedReduction reduction(topology_, order_, op);
  if (reduce_carried(op, reduction, result)) return;
  check_contributions(op);
  if (takes_sums(op)) return reduce_by_sums(op, reduction);
  if (takes_chain_) return reduce_by_chain_to_owners(op);
  Pieces offers = op.offers;
  if (op.record.kind == watch::Kind::reduce) offers.only = op.record.root;
  reduce_contributions(op, offers, result, largest_piece(op));
}

/// Whoever adds up for others counts on pieces that are alike.
void HierarchicalEngine::check_contributions(const Op& op) {
  for (int to = 0; to < world_size(); ++to) {
    for (int from = 1; from < world_size(); ++from) {
      const int64_t first = offered_bytes(0, to, op), bytes = offered_bytes(from, to, op);
      if (first == bytes) continue;
      sync().fail(c10::str("rank 0 gives ", first, " bytes for rank ", to, " where rank ", from, " gives ", bytes,
                           " in ", watch::describe(op.record)),
                  "let all ranks cut their tensors alike");
    }
  }
}

/// Of any rank for any other: the same number everywhere.
int64_t HierarchicalEngine::largest_piece(const Op& op) const {
  int64_t largest = 0;
  for (int from = 0; from < world_size(); ++from) {
    for (int to = 0; to < world_size(); ++to) largest = std::max(largest, offered_bytes(from, to, op));
  }
  return largest;
}

void HierarchicalEngine::reduce_contributions(const Op& op, const Pieces& offers, Piece result, int64_t largest) {
  const int n = world_size();
  const int64_t block = std::max(kContributionBytes / n / kLine * kLine, kLine);
  scratch_.resize(size_t(n * std::min(block, (largest + kLine - 1) / kLine * kLine)));
  for (int64_t begin = 0; begin < largest; begin += block) {
    const auto part_of = [&](Piece whole) {
      const int64_t from = std::min(whole.bytes, begin);
      return Piece{.data = whole.data + from, .bytes = std::min(block, whole.bytes - from)};
    };
    Pieces parts;
    Pieces contributions;
    const Piece part = part_of(result);
    for (int peer = 0; peer < n; ++peer) {
      parts.list.push_back(part_of(offers.at(peer)));
      contributions.list.push_back({.data = scratch_.data() + peer * part.bytes, .bytes = part.bytes});
    }
    contributions.list[size_t(rank())] = parts.at(rank());
    move_each(op, parts, contributions, std::vector<bool>(size_t(n), false));
    c10::SmallVector<const void*, 16> sources;
    for (int peer = 0; peer < n; ++peer) sources.push_back(contributions.at(peer).data);
    if (part.bytes > 0) op.kernel(part.data, sources.data(), n, part.bytes / op.element_bytes);
  }
}

}  // namespace serried::hierarchical
