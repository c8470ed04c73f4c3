// Walks the product of spans in row-major order.
#include "serried/tensor/random/owned_runs.h"

namespace serried::detail {

OwnedRuns::OwnedRuns(c10::IntArrayRef sizes, std::vector<std::vector<Span>> spans) {
  prepare(sizes, std::move(spans));
}

OwnedRuns::OwnedRuns(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at,
                     c10::IntArrayRef order) {
  c10::DimVector ordered;
  std::vector<std::vector<Span>> spans;
  for (int64_t i = 0; i < int64_t(sizes.size()); ++i) {
    const int64_t dim = order.empty() ? i : order[i];
    ordered.push_back(sizes[dim]);
    spans.push_back(owned_spans(sizes[dim], dim, placements, at));
  }
  prepare(ordered, std::move(spans));
}

void OwnedRuns::prepare(c10::IntArrayRef sizes, std::vector<std::vector<Span>> spans) {
  numel_ = 1;
  for (const auto& dim : spans) {
    int64_t owned = 0;
    for (const Span& span : dim) owned += span.size;
    numel_ *= owned;
  }
  done_ = numel_ == 0;
  if (done_) return;
  int64_t step = 1;
  bool inner_whole = true;
  for (int64_t d = int64_t(sizes.size()) - 1; d >= 0; --d) {
    const bool whole = spans[d].size() == 1 && spans[d][0].size == sizes[d];
    if (!inner_whole || !whole) {
      dims_.insert(dims_.begin(), {.spans = std::move(spans[d]), .step = step});
      dims_.front().index = dims_.front().spans.front().begin;
    }
    inner_whole &= whole;
    step *= sizes[d];
  }
  if (dims_.empty()) dims_.push_back({.spans = {{0, 1}}, .step = step});
}

bool OwnedRuns::advance_outer() {
  for (size_t d = dims_.size() - 1; d-- > 0;) {
    Dim& dim = dims_[d];
    if (++dim.index < dim.spans[dim.span].end()) return true;
    dim.span = dim.span + 1 < dim.spans.size() ? dim.span + 1 : 0;
    dim.index = dim.spans[dim.span].begin;
    if (dim.span > 0) return true;
  }
  return false;
}

bool OwnedRuns::next(Span& run) {
  if (done_) return false;
  int64_t begin = 0;
  for (size_t d = 0; d + 1 < dims_.size(); ++d) begin += dims_[d].index * dims_[d].step;
  Dim& last = dims_.back();
  const Span span = last.spans[last.span];
  run = {begin + span.begin * last.step, span.size * last.step};
  if (++last.span < last.spans.size()) return true;
  last.span = 0;
  done_ = !advance_outer();
  return true;
}

}  // namespace serried::detail
