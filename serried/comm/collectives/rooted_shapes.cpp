// Records of what ranks pass to a gather or a scatter, and what has to agree in them.
#include "serried/comm/collectives/rooted_shapes.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/pieces.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {
namespace {

// All records of a call have one length, so the number of dims has an end.
constexpr int64_t kMostDims = 16;

// A record ends with a shape: the number of dims, and as many sizes as there may be.
constexpr int64_t kShapeLength = 1 + kMostDims;

void append_shape(SizeExchange::Record& record, at::IntArrayRef shape) {
  record.push_back(int64_t(shape.size()));
  for (size_t dim = 0; dim < size_t(kMostDims); ++dim) record.push_back(dim < shape.size() ? shape[dim] : 0);
}

int64_t num_dims_of(const SizeExchange::Record& record) {
  return *(record.end() - kShapeLength);
}

std::vector<int64_t> shape_of(const SizeExchange::Record& record) {
  const auto sizes = record.end() - kMostDims;
  return {sizes, sizes + std::clamp<int64_t>(num_dims_of(record), 0, kMostDims)};
}

// ---- gather

struct GatherColumn {
  static constexpr size_t dst = 0, dtype = 1, needs_grad = 2;
};

std::string describe_passed(const SizeExchange::Record& record) {
  return watch::dtype_name(at::ScalarType(record[GatherColumn::dtype])) + "[" + c10::Join(",", shape_of(record)) + "]";
}

// Every rank sees the same table and raises the same.
void check_gather(const SizeExchange::Table& table) {
  const SizeExchange::Record& first = table[0];
  for (size_t rank = 0; rank < table.size(); ++rank) {
    const SizeExchange::Record& other = table[rank];
    if (other[GatherColumn::dst] != first[GatherColumn::dst]) {
      raise<c10::ValueError>({"gather",
                              c10::str("rank 0 gathers to rank ", first[GatherColumn::dst], " and rank ", rank,
                                       " to rank ", other[GatherColumn::dst]),
                              "pass the same dst on every rank"});
    }
    if (num_dims_of(other) > kMostDims) {
      raise<c10::ValueError>({"gather", c10::str("rank ", rank, " passed a tensor of ", num_dims_of(other), " dims"),
                              c10::str("pass one of at most ", kMostDims, " dims: x.flatten()")});
    }
    if (other[GatherColumn::dtype] == first[GatherColumn::dtype]) continue;
    raise<c10::ValueError>(
        {"gather", c10::str("rank 0 passed ", describe_passed(first), " and rank ", rank, " ", describe_passed(other)),
         "pass tensors of one dtype on every rank"});
  }
}

// ---- scatter

struct ScatterColumn {
  static constexpr size_t rank = 0, src = 1, count = 2, odd_place = 3, odd_kind = 4, odd_dtype = 5;
  static constexpr size_t dtype = 6, is_meta = 7, needs_grad = 8, shapes = 9, sizes = 10;
};

// Why a list cannot be sent.
enum class Oddity : int64_t { none, undefined, not_plain, dtype, device, dims };

struct OddTensor {
  int64_t place = 0;
  Oddity kind = Oddity::none;
};

Oddity oddity_of(const at::Tensor& x, const at::Tensor& first) {
  if (!x.defined()) return Oddity::undefined;
  if (x.layout() != at::kStrided || x.is_quantized() || is_dist_tensor(x)) return Oddity::not_plain;
  if (x.scalar_type() != first.scalar_type()) return Oddity::dtype;
  if (x.device() != first.device()) return Oddity::device;
  return x.dim() > kMostDims ? Oddity::dims : Oddity::none;
}

OddTensor find_odd(at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Oddity kind = oddity_of(tensors[i], tensors[0]);
    if (kind != Oddity::none) return {int64_t(i), kind};
  }
  return {};
}

std::string describe_odd(const SizeExchange::Record& list) {
  const auto dtype = [&](size_t column) { return watch::dtype_name(at::ScalarType(list[column])); };
  switch (Oddity(list[ScatterColumn::odd_kind])) {
    case Oddity::undefined: return "is undefined";
    case Oddity::not_plain: return "is sparse, quantized or distributed";
    case Oddity::dtype:
      return "is " + dtype(ScatterColumn::odd_dtype) + " and the first " + dtype(ScatterColumn::dtype);
    case Oddity::device: return "is on another device than the first";
    default: return c10::str("has more than ", kMostDims, " dims");
  }
}

bool can_be_sent(at::TensorList tensors, const Group& group) {
  return int(tensors.size()) == group->getSize() && find_odd(tensors).kind == Oddity::none;
}

int64_t dtype_in_record(const at::Tensor& x) {
  return x.defined() ? int64_t(x.scalar_type()) : -1;
}

bool any_needs_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return x.defined() && needs_grad(x); });
}

// Each rank hears the shape of its own tensor only.
int64_t hash_of_shapes(at::TensorList tensors) {
  int64_t hash = 0;
  for (const at::Tensor& x : tensors) hash = watch::hash_sizes({hash, x.sizes()});
  return hash;
}

// What each rank hears of this rank's list; a list that cannot be sent has no sizes.
SizeExchange::Table scatter_records(at::TensorList tensors, const Group& group, int src) {
  const OddTensor odd = find_odd(tensors);
  const at::Tensor first = tensors.empty() ? at::Tensor() : tensors[0];
  const bool fits = can_be_sent(tensors, group);
  SizeExchange::Record common(ScatterColumn::sizes, 0);
  common[ScatterColumn::rank] = group->getRank();
  common[ScatterColumn::src] = src;
  common[ScatterColumn::count] = int64_t(tensors.size());
  common[ScatterColumn::odd_place] = odd.place;
  common[ScatterColumn::odd_kind] = int64_t(odd.kind);
  common[ScatterColumn::odd_dtype] = tensors.empty() ? -1 : dtype_in_record(tensors[size_t(odd.place)]);
  common[ScatterColumn::dtype] = dtype_in_record(first);
  common[ScatterColumn::is_meta] = first.defined() && first.is_meta();
  common[ScatterColumn::needs_grad] = any_needs_grad(tensors);
  if (fits) common[ScatterColumn::shapes] = hash_of_shapes(tensors);
  const size_t num_ranks = size_t(group->getSize());
  for (size_t rank = 0; rank < num_ranks; ++rank) common.push_back(fits ? tensors[rank].numel() : 0);
  SizeExchange::Table to_each(num_ranks, common);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    append_shape(to_each[rank], fits ? tensors[rank].sizes() : at::IntArrayRef());
  }
  return to_each;
}

// Every rank sees the same of each other's calls and raises the same.
void check_scatter(const SizeExchange::Table& table) {
  const SizeExchange::Record& first = table[0];
  const int64_t src = first[ScatterColumn::src];
  for (const SizeExchange::Record& other : table) {
    if (other[ScatterColumn::src] == src) continue;
    raise<c10::ValueError>(
        {"scatter",
         c10::str("rank ", first[ScatterColumn::rank], " expects the list from rank ", src, " and rank ",
                  other[ScatterColumn::rank], " from rank ", other[ScatterColumn::src]),
         "pass the same src on every rank"});
  }
  for (const SizeExchange::Record& other : table) {
    if (other[ScatterColumn::rank] == src || other[ScatterColumn::count] == 0) continue;
    raise<c10::ValueError>({"scatter",
                            c10::str("rank ", other[ScatterColumn::rank], " passed ", other[ScatterColumn::count],
                                     " tensors, and the source is rank ", src),
                            c10::str("pass {} on every rank but ", src)});
  }
}

void check_list(const SizeExchange::Record& list, int num_ranks) {
  if (list[ScatterColumn::count] != num_ranks) {
    raise<c10::ValueError>({"scatter",
                            c10::str("rank ", list[ScatterColumn::src], " passed ", list[ScatterColumn::count],
                                     " tensors for ", num_ranks, " ranks"),
                            c10::str("pass one for each rank, such as x.tensor_split(", num_ranks, ")")});
  }
  if (list[ScatterColumn::odd_kind] == int64_t(Oddity::none)) return;
  raise<c10::ValueError>({"scatter",
                          c10::str("tensor ", list[ScatterColumn::odd_place], " of rank ", list[ScatterColumn::src],
                                   "'s list ", describe_odd(list)),
                          c10::str("pass plain tensors of one dtype, on one device, of at most ", kMostDims, " dims")});
}

const SizeExchange::Record& list_of_source(const SizeExchange::Table& table) {
  for (const SizeExchange::Record& record : table) {
    if (record[ScatterColumn::rank] == record[ScatterColumn::src]) return record;
  }
  raise<c10::ValueError>({"scatter",
                          c10::str("the backend moves nothing, so that rank ", table[0][ScatterColumn::rank],
                                   " cannot learn what rank ", table[0][ScatterColumn::src], " would send"),
                          "scatter from this rank, or use a backend that communicates"});
}

// Backends that move nothing give back what this rank has said.
bool has_moved(const SizeExchange::Table& table) {
  for (size_t rank = 0; rank < table.size(); ++rank) {
    if (table[rank][ScatterColumn::rank] != int64_t(rank)) return false;
  }
  return true;
}

at::Tensor in_a_row(at::TensorList tensors) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& x : tensors) rows.push_back(x.reshape({-1}));
  return at::cat(rows);
}

}  // namespace

at::Tensor zeros_without_memory(int64_t size, const at::TensorOptions& options) {
  return at::zeros({}, options).expand({size});
}

GatherShapes::GatherShapes(const at::Tensor& x, const Group& group, int dst, TimeoutMs timeout, bool now) {
  SizeExchange::Record mine{dst, int64_t(x.scalar_type()), needs_grad(x)};
  append_shape(mine, x.sizes());
  if (x.is_meta() || group->getSize() == 1) {
    alone_.assign(size_t(group->getSize()), mine);
  } else {
    const watch::PartOf scope("gather");
    exchange_.emplace("gather", x.device(), group, mine, timeout, now);
  }
}

GatheredParts GatherShapes::get() const {
  const SizeExchange::Table table = exchange_ ? exchange_->get() : alone_;
  check_gather(table);
  if (exchange_) exchange_->check_recordable();
  GatheredParts parts;
  for (const SizeExchange::Record& record : table) {
    parts.shapes.push_back(shape_of(record));
    parts.sizes.push_back(c10::multiply_integers(parts.shapes.back()));
    parts.need_grad |= record[GatherColumn::needs_grad] != 0;
  }
  parts.sizes_of_all = hash_of(table);
  return parts;
}

ScatterShapes::ScatterShapes(at::TensorList tensors, const Group& group, int src, TimeoutMs timeout, bool now)
    : rank_(group->getRank()), device_(device_of(group)) {
  if (rank_ == src && can_be_sent(tensors, group)) row_ = in_a_row(tensors);
  const SizeExchange::Table to_each = scatter_records(tensors, group, src);
  if (group->getSize() == 1) {
    alone_ = to_each;
  } else {
    const watch::PartOf scope("scatter");
    exchange_.emplace("scatter", device_, group, to_each, timeout, now);
  }
}

ScatteredParts ScatterShapes::get() const {
  SizeExchange::Table table = exchange_ ? exchange_->get() : alone_;
  const int num_ranks = int(table.size());
  if (!has_moved(table)) table = {table[size_t(rank_)]};
  check_scatter(table);
  const SizeExchange::Record& list = list_of_source(table);
  check_list(list, num_ranks);
  if (exchange_) exchange_->check_recordable();
  const auto sizes = list.begin() + ScatterColumn::sizes;
  const at::Device device = list[ScatterColumn::is_meta] != 0 ? at::Device(at::kMeta) : device_;
  return {shape_of(list),
          {sizes, sizes + num_ranks},
          at::device(device).dtype(at::ScalarType(list[ScatterColumn::dtype])),
          list[ScatterColumn::needs_grad] != 0,
          watch::hash_sizes({at::IntArrayRef(list.data(), ScatterColumn::sizes + size_t(num_ranks))})};
}

at::Tensor ScatterShapes::input(const ScatteredParts& parts) const {
  if (row_.defined()) return row_;
  const bool joins = parts.need_grad && c10::GradMode::is_enabled();
  return at::zeros({}, parts.options).set_requires_grad(joins).expand({sum_of(parts.sizes)});
}

}  // namespace serried::detail
