// Boxes travel packed one after the other, so that one all_to_all of flat pieces carries any change of layout.
#include "serried/tensor/redistribute/exchange.h"

#include <ATen/ATen.h>

#include "serried/comm/collectives/ops.h"

namespace serried::detail {
namespace {

using spmd::Box;

int64_t num_elements(const Box& box) {
  int64_t count = 1;
  for (const Span& span : box) count *= span.size;
  return count;
}

c10::DimVector sizes_of(const Box& box) {
  c10::DimVector sizes;
  for (const Span& span : box) sizes.push_back(span.size);
  return sizes;
}

std::vector<int64_t> counts_of(const std::vector<std::vector<Box>>& boxes) {
  std::vector<int64_t> counts;
  for (const auto& peer : boxes) {
    int64_t count = 0;
    for (const Box& box : peer) count += num_elements(box);
    counts.push_back(count);
  }
  return counts;
}

int64_t total(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (int64_t count : counts) sum += count;
  return sum;
}

/// Calls `visit(box, its piece of flat)` in the order of the peers.
template <class Visit>
void for_each_piece(const at::Tensor& flat, const std::vector<std::vector<Box>>& boxes, Visit visit) {
  int64_t begin = 0;
  for (const auto& peer : boxes) {
    for (const Box& box : peer) {
      const int64_t count = num_elements(box);
      visit(box, flat.narrow(0, begin, count).view(sizes_of(box)));
      begin += count;
    }
  }
}

}  // namespace

PartBoxes::PartBoxes(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at)
    : boxes_(spmd::owned_boxes(sizes, placements, at)) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    spans_.push_back(owned_spans(sizes[dim], int64_t(dim), placements, at));
  }
}

c10::DimVector PartBoxes::local_sizes() const {
  c10::DimVector sizes;
  for (const auto& spans : spans_) {
    int64_t size = 0;
    for (const Span& span : spans) size += span.size;
    sizes.push_back(size);
  }
  return sizes;
}

at::Tensor PartBoxes::view(const at::Tensor& local, const Box& box) const {
  at::Tensor view = local;
  for (size_t dim = 0; dim < box.size(); ++dim) {
    int64_t before = 0;
    for (const Span& span : spans_[dim]) {
      if (box[dim].begin < span.end()) {
        view = view.narrow(int64_t(dim), before + box[dim].begin - span.begin, box[dim].size);
        break;
      }
      before += span.size;
    }
  }
  return view;
}

std::vector<Box> common_boxes(const PartBoxes& from, const PartBoxes& to) {
  std::vector<Box> common;
  for (const Box& a : from.boxes()) {
    for (const Box& b : to.boxes()) {
      if (auto box = spmd::intersect(a, b)) common.push_back(std::move(*box));
    }
  }
  return common;
}

at::Tensor exchange_boxes(const at::Tensor& local, const Group& group, Exchange exchange,
                          const at::TensorOptions& options, StartedStep* started) {
  const std::vector<int64_t> sent = counts_of(exchange.sends);
  const std::vector<int64_t> received = counts_of(exchange.receives);
  at::Tensor packed = at::empty({total(sent)}, options);
  for_each_piece(packed, exchange.sends,
                 [&](const Box& box, const at::Tensor& piece) { piece.copy_(exchange.source->view(local, box)); });
  const at::Tensor arrived =
      ops::all_to_all(packed, group, 0, 0, sent, received, watch::hash_sizes({exchange.sizes}), work_of(started));
  packed.reset();
  if (!exchange.target) return {};
  at::Tensor result = at::empty(exchange.target->local_sizes(), options);
  run_after(started, [result, arrived, exchange = std::move(exchange)] {
    for_each_piece(arrived, exchange.receives,
                   [&](const Box& box, const at::Tensor& piece) { exchange.target->view(result, box).copy_(piece); });
  });
  return result;
}

}  // namespace serried::detail
