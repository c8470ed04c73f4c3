// Before pieces of different sizes travel, ranks tell each other what they hold: one small all_gather of int64.
#pragma once

#include "serried/comm/collectives/op.h"

#include <vector>

namespace serried::detail {

/// What every rank says of its tensor, on its way. Observers are not told: it is part of the collective that needs it.
class SizeExchange {
 public:
  using Record = std::vector<int64_t>;
  using Table = std::vector<Record>;  // by rank

  /// `mine` goes to every rank. `now`: blocks until it is complete, without a Work.
  SizeExchange(const char* where, at::Device device, const Group& group, const Record& mine, TimeoutMs timeout,
               bool now);
  /// To each rank a record of its own, all of one length.
  SizeExchange(const char* where, at::Device device, const Group& group, const Table& to_each, TimeoutMs timeout,
               bool now);

  bool is_complete() const { return !work_ || work_->isCompleted(); }
  /// The records of all ranks, in order.
  Table get() const;
  /// Where a captured function is recorded: NotImplementedError if the ranks of the group cannot compare their calls
  /// before anything is sent. Those that replay graphs of different sizes would not find out.
  void check_recordable() const;

 private:
  void move_to(at::Device device);
  void exchange(watch::Kind kind, TimeoutMs timeout, bool now);

  const char* where_;
  Group group_;
  at::Tensor mine_;
  at::Tensor all_;
  WorkPtr work_;  // null: it is complete
};

/// watch::hash_sizes of all that ranks have said.
uint32_t hash_of(const SizeExchange::Table& table);

/// What every rank holds along `dim`. A meta tensor communicates nothing: every rank is taken to hold as much.
class GatherSizes {
 public:
  GatherSizes(const at::Tensor& x, const Group& group, int64_t dim, TimeoutMs timeout, bool now);

  bool are_known() const { return !exchange_ || exchange_->is_complete(); }
  /// Blocks. ValueError on every rank, naming two of them and their tensors, where dtypes or other dims differ.
  std::vector<int64_t> get() const;

 private:
  std::vector<int64_t> alone_;
  std::optional<SizeExchange> exchange_;
};

struct ArrivingSizes {
  std::vector<int64_t> sizes;  // by rank
  uint32_t sizes_of_all = 0;   // watch::hash_sizes of what every rank has said
};

/// What comes from each rank along `concat_dim` when rank p sends split_sizes[q] along `split_dim` to rank q.
class ExchangeSizes {
 public:
  ExchangeSizes(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                at::IntArrayRef split_sizes, TimeoutMs timeout, bool now);

  bool are_known() const { return !exchange_ || exchange_->is_complete(); }
  ArrivingSizes get() const;

 private:
  bool one_dim_;
  int rank_;
  std::vector<int64_t> alone_;
  std::optional<SizeExchange> exchange_;
};

}  // namespace serried::detail
