// Boxes of rows between ranks: packed, one all_to_all, unpacked. A rank's own rows are copied where they are.
#include "serried/tensor/redistribute/borders.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/spmd/windows.h"

namespace serried::detail {
namespace {

int64_t num_places(const std::vector<Span>& rows) {
  int64_t count = 1;
  for (const Span& span : rows) count *= span.size;
  return count;
}

// Whether one part wants rows that another one holds.
bool crosses(const BorderedDim& dim) {
  for (size_t from = 0; from < dim.holds.size(); ++from) {
    for (size_t to = 0; to < dim.wants.size(); ++to) {
      if (from != to && spmd::common_rows(dim.holds[from], dim.wants[to]).size > 0) return true;
    }
  }
  return false;
}

int64_t extent_of(const BorderedDim& dim) {
  int64_t end = 0;
  for (const Span& span : dim.holds) end = std::max(end, span.end());
  return end;
}

}  // namespace

BorderExchange::BorderExchange(const DeviceMesh& mesh, std::vector<BorderedDim> dims)
    : mesh_(mesh), dims_(std::move(dims)) {
  std::set<int64_t> axes;
  for (const BorderedDim& dim : dims_) {
    axes.insert(dim.axes.begin(), dim.axes.end());
    moves_ = moves_ || crosses(dim);
  }
  const Position at = mesh.position();
  for (const int64_t axis : axes) {
    if (at.mesh_shape[axis] == 1) continue;
    axes_.push_back(axis);
    num_ranks_ *= at.mesh_shape[axis];
    rank_ = rank_ * at.mesh_shape[axis] + at.coordinate[axis];
  }
}

// The part of `dim` that the `peer`-th rank of the axes has.
size_t BorderExchange::part_of(int64_t peer, const BorderedDim& dim) const {
  size_t part = 0;
  int64_t ranks_behind = num_ranks_;
  for (const int64_t axis : axes_) {
    const int64_t size = mesh_.size(axis);
    ranks_behind /= size;
    const bool cuts = std::find(dim.axes.begin(), dim.axes.end(), axis) != dim.axes.end();
    if (cuts) part = part * size_t(size) + size_t(peer / ranks_behind % size);
  }
  return part;
}

BorderExchange::Rows BorderExchange::rows_of(int64_t peer, Spans spans) const {
  Rows rows;
  for (const BorderedDim& dim : dims_) rows.push_back((dim.*spans)[part_of(peer, dim)]);
  return rows;
}

BorderExchange::Rows BorderExchange::common(int64_t from, Spans a, int64_t to, Spans b) const {
  Rows rows = rows_of(from, a);
  const Rows others = rows_of(to, b);
  for (size_t d = 0; d < rows.size(); ++d) rows[d] = spmd::common_rows(rows[d], others[d]);
  return rows;
}

// Where `rows` lie in `t`, which has this rank's rows `of`.
at::Tensor BorderExchange::view(const at::Tensor& t, const Rows& rows, Spans of) const {
  const Rows all = rows_of(rank_, of);
  at::Tensor view = t;
  for (size_t d = 0; d < rows.size(); ++d) {
    view = view.narrow(dims_[d].dim, rows[d].size == 0 ? 0 : rows[d].begin - all[d].begin, rows[d].size);
  }
  return view;
}

Sizes BorderExchange::with_rows(c10::IntArrayRef sizes, Spans spans) const {
  Sizes changed = sizes.vec();
  const Rows rows = rows_of(rank_, spans);
  for (size_t d = 0; d < rows.size(); ++d) changed[size_t(dims_[d].dim)] = rows[d].size;
  return changed;
}

bool BorderExchange::wants_what_it_holds() const {
  return rows_of(rank_, &BorderedDim::wants) == rows_of(rank_, &BorderedDim::holds);
}

bool BorderExchange::wants_more_than_exists() const {
  const Rows rows = rows_of(rank_, &BorderedDim::wants);
  for (size_t d = 0; d < rows.size(); ++d) {
    if (rows[d].begin < 0 || rows[d].end() > extent_of(dims_[d])) return true;
  }
  return false;
}

// Every rank sends of its rows `from` those that others have among `to`. Calls arrived(rows, piece) rank by rank.
template <class Arrived>
void BorderExchange::exchange(const at::Tensor& sent, Spans from, Spans to, Arrived arrived) const {
  const int64_t per_place = [&] {
    int64_t count = 1;
    const auto is_cut = [&](int64_t d) {
      return std::any_of(dims_.begin(), dims_.end(), [&](const BorderedDim& dim) { return dim.dim == d; });
    };
    for (int64_t d = 0; d < sent.dim(); ++d) count *= is_cut(d) ? 1 : sent.size(d);
    return count;
  }();
  std::vector<int64_t> send_counts, receive_counts;
  std::vector<at::Tensor> pieces;
  for (int64_t peer = 0; peer < num_ranks_; ++peer) {
    const Rows given = common(rank_, from, peer, to);
    send_counts.push_back(peer == rank_ ? 0 : num_places(given) * per_place);
    receive_counts.push_back(peer == rank_ ? 0 : num_places(common(peer, from, rank_, to)) * per_place);
    if (send_counts.back() > 0) pieces.push_back(view(sent, given, from).reshape({-1}));
  }
  const at::Tensor packed = pieces.empty() ? at::empty({0}, sent.options()) : at::cat(pieces);
  std::vector<int64_t> known;
  for (const BorderedDim& dim : dims_) {
    for (const Spans spans : {from, to}) {
      for (const Span& span : dim.*spans) known.insert(known.end(), {span.begin, span.size});
    }
  }
  const Group group = axes_.size() == 1 ? mesh_.get_group(axes_[0]) : mesh_.get_merged_group(axes_);
  const at::Tensor flat = ops::all_to_all(packed, group, 0, 0, send_counts, receive_counts, watch::hash_sizes({known}));
  int64_t begin = 0;
  for (int64_t peer = 0; peer < num_ranks_; ++peer) {
    const int64_t count = receive_counts[size_t(peer)];
    if (count > 0) arrived(common(peer, from, rank_, to), flat.narrow(0, begin, count));
    begin += count;
  }
}

at::Tensor BorderExchange::fetch(const at::Tensor& held, const at::Scalar& fill) const {
  constexpr Spans kHolds = &BorderedDim::holds, kWants = &BorderedDim::wants;
  if (!moves_ && wants_what_it_holds()) return held;
  const Sizes sizes = wanted_sizes(held.sizes());
  at::Tensor wanted =
      wants_more_than_exists() ? at::full(sizes, fill, held.options()) : at::empty(sizes, held.options());
  const Rows own = common(rank_, kHolds, rank_, kWants);
  if (num_places(own) > 0) view(wanted, own, kWants).copy_(view(held, own, kHolds));
  if (!moves_) return wanted;
  exchange(held, kHolds, kWants, [&](const Rows& rows, const at::Tensor& piece) {
    const at::Tensor place = view(wanted, rows, kWants);
    place.copy_(piece.view(place.sizes()));
  });
  return wanted;
}

at::Tensor BorderExchange::give_back(const at::Tensor& wanted) const {
  constexpr Spans kHolds = &BorderedDim::holds, kWants = &BorderedDim::wants;
  if (!moves_ && wants_what_it_holds()) return wanted;
  at::Tensor held = at::zeros(with_rows(wanted.sizes(), kHolds), wanted.options());
  const Rows own = common(rank_, kHolds, rank_, kWants);
  if (num_places(own) > 0) view(held, own, kHolds).copy_(view(wanted, own, kWants));
  if (!moves_) return held;
  exchange(wanted, kWants, kHolds, [&](const Rows& rows, const at::Tensor& piece) {
    const at::Tensor place = view(held, rows, kHolds);
    place.add_(piece.view(place.sizes()));
  });
  return held;
}

int64_t BorderExchange::most_fetched() const {
  return most_sent(&BorderedDim::holds, &BorderedDim::wants);
}

int64_t BorderExchange::most_given_back() const {
  return most_sent(&BorderedDim::wants, &BorderedDim::holds);
}

int64_t BorderExchange::most_sent(Spans from, Spans to) const {
  if (!moves_) return 0;
  int64_t most = 0;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    // Boxes are products of spans, and so sums over all peers are products of sums.
    int64_t all = 1, own = 1;
    for (const BorderedDim& dim : dims_) {
      const size_t part = part_of(rank, dim);
      int64_t of_dim = 0;
      for (const Span& wanted : dim.*to) of_dim += spmd::common_rows((dim.*from)[part], wanted).size;
      all *= of_dim;
      own *= spmd::common_rows((dim.*from)[part], (dim.*to)[part]).size;
    }
    most = std::max(most, all - own);
  }
  return most;
}

}  // namespace serried::detail
