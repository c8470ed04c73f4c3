// What every rank holds, told to all before pieces of different sizes travel.
#include "serried/comm/collectives/piece_sizes.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

// Every rank must send a record of one length, whatever its tensor's dims; dims beyond these are compared by hash.
constexpr int64_t kMaxDims = 10;

struct Column {
  static constexpr int64_t dtype = 0, num_dims = 1, split_dim = 2, concat_dim = 3, split_size = 4, concat_size = 5;
  static constexpr int64_t hash = 6, sizes = 7, extra = sizes + kMaxDims;
};

// A hash of the sizes of all dims but the two that may differ.
int64_t hash_of_fixed_sizes(const at::Tensor& x, int64_t split_dim, int64_t concat_dim) {
  uint64_t hash = 1469598103934665603ull;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (dim == split_dim || dim == concat_dim) continue;
    hash = (hash ^ uint64_t(x.size(dim))) * 1099511628211ull;
  }
  return int64_t(hash);
}

std::vector<int64_t> make_record(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, at::IntArrayRef extra) {
  std::vector<int64_t> record(Column::extra, -1);
  record[Column::dtype] = int64_t(x.scalar_type());
  record[Column::num_dims] = x.dim();
  record[Column::split_dim] = split_dim;
  record[Column::concat_dim] = concat_dim;
  record[Column::split_size] = x.size(split_dim);
  record[Column::concat_size] = x.size(concat_dim);
  record[Column::hash] = hash_of_fixed_sizes(x, split_dim, concat_dim);
  for (int64_t dim = 0; dim < std::min(x.dim(), kMaxDims); ++dim) record[Column::sizes + dim] = x.size(dim);
  record.insert(record.end(), extra.begin(), extra.end());
  return record;
}

using Table = SizeExchange::Table;

std::string describe(const std::vector<int64_t>& record) {
  const int64_t num_dims = record[Column::num_dims];
  std::vector<std::string> sizes;
  for (int64_t dim = 0; dim < std::min(num_dims, kMaxDims); ++dim) {
    sizes.push_back(std::to_string(record[Column::sizes + dim]));
  }
  if (num_dims > kMaxDims) sizes.push_back("...");
  return watch::dtype_name(at::ScalarType(record[Column::dtype])) + "[" + c10::Join(",", sizes) + "]";
}

std::string describe_dims(const std::vector<int64_t>& record) {
  const int64_t split = record[Column::split_dim], concat = record[Column::concat_dim];
  return split == concat ? c10::str("dim ", split) : c10::str("dims ", split, " and ", concat);
}

// The first pair of ranks that differ in what must agree; every rank sees the same table and raises the same.
void check_agreement(std::string_view where, const Table& table) {
  const std::vector<int64_t>& first = table[0];
  for (size_t rank = 1; rank < table.size(); ++rank) {
    const std::vector<int64_t>& other = table[rank];
    const bool same_dims = std::equal(first.begin() + Column::split_dim, first.begin() + Column::split_size,
                                      other.begin() + Column::split_dim);
    if (!same_dims) {
      raise<c10::ValueError>(
          {where,
           c10::str("rank 0 works along ", describe_dims(first), " and rank ", rank, " along ", describe_dims(other)),
           "pass the same dims on every rank"});
    }
    const bool agree = first[Column::dtype] == other[Column::dtype] &&
                       first[Column::num_dims] == other[Column::num_dims] && first[Column::hash] == other[Column::hash];
    if (agree) continue;
    raise<c10::ValueError>({where,
                            c10::str("rank 0 passed ", describe(first), " and rank ", rank, " ", describe(other),
                                     ": only ", describe_dims(first), " may differ"),
                            "pass tensors of one dtype whose other dims agree on every rank"});
  }
}

std::vector<int64_t> column(const Table& table, int64_t index) {
  std::vector<int64_t> values;
  for (const auto& record : table) values.push_back(record[index]);
  return values;
}

// Pieces for one rank are laid side by side along concat_dim, so they must agree along split_dim.
void check_pieces(const Table& table) {
  for (size_t to = 0; to < table.size(); ++to) {
    const std::vector<int64_t> sizes = column(table, Column::extra + int64_t(to));
    for (size_t from = 1; from < sizes.size(); ++from) {
      if (sizes[from] == sizes[0]) continue;
      raise<c10::ValueError>(
          {"all_to_all",
           c10::str("rank ", to, " gets ", sizes[0], " along dim ", table[0][Column::split_dim], " from rank 0 (of ",
                    describe(table[0]), ") and ", sizes[from], " from rank ", from, " (of ", describe(table[from]),
                    "): pieces laid along dim ", table[0][Column::concat_dim], " must agree along the other dims"),
           "pass tensors of one size along split_dim, or the same split_sizes on every rank"});
    }
  }
}

bool are_equal(const std::vector<int64_t>& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes[0]; });
}

// Whether all ranks send and get pieces of one size.
bool are_even(const Table& table) {
  std::vector<int64_t> sent;
  for (const auto& record : table) sent.insert(sent.end(), record.begin() + Column::extra, record.end());
  return are_equal(sent) && are_equal(column(table, Column::concat_size));
}

// Of a call that asks: none that knows all sizes may take itself for it.
constexpr uint32_t kAsksForSizes = 1;

}  // namespace

SizeExchange::SizeExchange(const char* where, at::Device device, const Group& group, const Record& mine,
                           TimeoutMs timeout, bool now)
    : where_(where), group_(group) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t length = int64_t(mine.size());
  mine_ = at::empty({length}, at::kLong);
  all_ = at::empty({group->getSize(), length}, at::kLong);
  std::copy(mine.begin(), mine.end(), mine_.mutable_data_ptr<int64_t>());
  // Filled with this rank's own, so that a backend that moves nothing makes all ranks alike.
  int64_t* next = all_.mutable_data_ptr<int64_t>();
  for (int rank = 0; rank < group->getSize(); ++rank) next = std::copy(mine.begin(), mine.end(), next);
  move_to(device);
  exchange(watch::Kind::all_gather, timeout, now);
}

SizeExchange::SizeExchange(const char* where, at::Device device, const Group& group, const Table& to_each,
                           TimeoutMs timeout, bool now)
    : where_(where), group_(group) {
  at::AutoDispatchBelowADInplaceOrView below;
  mine_ = at::empty({group->getSize(), int64_t(to_each[0].size())}, at::kLong);
  int64_t* next = mine_.mutable_data_ptr<int64_t>();
  for (const Record& record : to_each) next = std::copy(record.begin(), record.end(), next);
  all_ = at::empty_like(mine_);
  move_to(device);
  exchange(watch::Kind::all_to_all, timeout, now);
}

void SizeExchange::move_to(at::Device device) {
  if (device.is_cpu()) return;
  mine_ = mine_.to(device);
  all_ = all_.to(device);
}

void SizeExchange::exchange(watch::Kind kind, TimeoutMs timeout, bool now) {
  const Collective records{.kind = kind,
                           .where = where_,
                           .inputs = mine_,
                           .outputs = all_,
                           .timeout = in_milliseconds(timeout),
                           .sizes_of_all = kAsksForSizes};
  if (now) {
    run_quietly(group_, records);
  } else {
    work_ = start_quietly(group_, records);
  }
}

uint32_t hash_of(const Table& table) {
  std::vector<int64_t> all;
  for (const auto& record : table) all.insert(all.end(), record.begin(), record.end());
  return watch::hash_sizes({all});
}

void SizeExchange::check_recordable() const {
  if (!tape::is_recording() || group_->getBackendName() == "fake") return;  // which moves nothing
  const auto backend = group_->getBackend(mine_.device().type());
  if (capabilities_of(*backend).compares_calls) return;
  raise<c10::NotImplementedError>(
      {where_,
       c10::str("the graph of a captured function would count on what other ranks hold, and the backend \"",
                backend->getBackendName(), "\" of group \"", group_->getGroupName(),
                "\" does not compare that before it sends"),
       "call it outside of the captured function, or with all_gather_into, all_to_all_into or tensors of one size"});
}

Table SizeExchange::get() const {
  at::AutoDispatchBelowADInplaceOrView below;
  if (work_) work_->wait();
  const at::Tensor host = all_.cpu();
  Table table;
  for (int64_t rank = 0; rank < host.size(0); ++rank) {
    const int64_t* row = host.const_data_ptr<int64_t>() + rank * host.size(1);
    table.emplace_back(row, row + host.size(1));
  }
  return table;
}

GatherSizes::GatherSizes(const at::Tensor& x, const Group& group, int64_t dim, TimeoutMs timeout, bool now) {
  if (x.is_meta() || group->getSize() == 1) {
    alone_.assign(group->getSize(), x.size(dim));
  } else {
    exchange_.emplace("all_gather", x.device(), group, make_record(x, dim, dim, {}), timeout, now);
  }
}

std::vector<int64_t> GatherSizes::get() const {
  if (!exchange_) return alone_;
  const Table table = exchange_->get();
  check_agreement("all_gather", table);
  std::vector<int64_t> sizes = column(table, Column::split_size);
  if (!are_equal(sizes)) exchange_->check_recordable();
  return sizes;
}

ExchangeSizes::ExchangeSizes(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                             at::IntArrayRef split_sizes, TimeoutMs timeout, bool now)
    : one_dim_(split_dim == concat_dim), rank_(group->getRank()) {
  if (x.is_meta() || group->getSize() == 1) {
    alone_.assign(group->getSize(), one_dim_ ? split_sizes[rank_] : x.size(concat_dim));
  } else {
    exchange_.emplace("all_to_all", x.device(), group, make_record(x, split_dim, concat_dim, split_sizes), timeout,
                      now);
  }
}

ArrivingSizes ExchangeSizes::get() const {
  if (!exchange_) return {alone_, 0};
  const Table table = exchange_->get();
  check_agreement("all_to_all", table);
  if (!one_dim_) check_pieces(table);
  if (!are_even(table)) exchange_->check_recordable();
  const int64_t arriving = one_dim_ ? Column::extra + rank_ : Column::concat_size;
  return {column(table, arriving), hash_of(table)};
}

}  // namespace serried::detail
