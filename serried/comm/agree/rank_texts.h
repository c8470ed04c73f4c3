// Ranks share and compare small texts: through a store, before there is a group or where some do not take part, and
// through a group.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serried/comm/collectives/collectives.h"

namespace serried::detail {

/// "rank 3", "ranks 1, 2", "ranks 0-5, 9": ranks in messages, the same way everywhere; `ranks` ascend.
std::string rank_list(const std::vector<int>& ranks);

/// The ranks that meet on a store, and this one among them.
struct StoreRanks {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
};

/// All ranks' `mine`, in rank order. Blocks until all have come; after the timeout a DistBackendError names those that
/// have not. `key` is used once per store; `where` is the call that waits.
std::vector<std::string> exchange(const StoreRanks& ranks, std::string_view where, const std::string& key,
                                  const std::string& mine);

/// The halves of it, where one rank tells and the others listen.
void tell(const StoreRanks& ranks, const std::string& key, const std::string& text);
std::string listen_to(const StoreRanks& ranks, std::string_view where, const std::string& key, int rank);

/// The text that the first rank to come wrote under `key`: `mine`, if that was this one. Waits for nobody.
std::string first_text(c10d::Store& store, const std::string& key, const std::string& mine);

/// ValueError that shows both texts if another rank wrote another one under `key`. Waits for nobody.
void agree(c10d::Store& store, const std::string& key, std::string_view where, const std::string& mine);

/// A list of texts of each rank, in the store of a group: a rank adds to its own, and reads those of the others from
/// the first on. Ranks that read nothing need not take part.
class RankLog {
 public:
  RankLog(const Group& group, std::string prefix);

  void add(const std::string& text);

  /// Text `index` of `rank`; nothing where it has not come by `deadline`. Raises what the store raises before that.
  std::optional<std::string> read(int rank, int64_t index, std::chrono::steady_clock::time_point deadline) const;

 private:
  const int rank_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
};

/// Every rank's `mine`, of any length, in rank order, on every rank of the group.
std::vector<std::string> all_gather_bytes(const std::string& mine, const Group& group,
                                          std::optional<std::chrono::milliseconds> timeout = {});

/// The same on rank `to`; nothing elsewhere. Each text travels once.
std::vector<std::string> gather_bytes(const std::string& mine, const Group& group, int to);

/// Rank src's `mine` on every rank.
std::string broadcast_bytes(const std::string& mine, const Group& group, const BroadcastOptions& options);

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

}  // namespace serried::detail
