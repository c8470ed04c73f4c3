// Moving boxes of a tensor between ranks: pack, one all_to_all, unpack.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {

/// One rank's part of a tensor: global indices of its elements, and so where a box of them lies in its local tensor.
class PartBoxes {
 public:
  PartBoxes(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at);

  const std::vector<spmd::Box>& boxes() const { return boxes_; }
  c10::DimVector local_sizes() const;
  /// The place in the local tensor of a box that one of boxes() contains.
  at::Tensor view(const at::Tensor& local, const spmd::Box& box) const;

 private:
  std::vector<std::vector<Span>> spans_;  // per dim
  std::vector<spmd::Box> boxes_;
};

/// What `to` takes of `from`, in an order both sides compute alike.
std::vector<spmd::Box> common_boxes(const PartBoxes& from, const PartBoxes& to);

/// Per peer of the group the boxes to send out of `source` and to put into `target`; either may be absent.
struct Exchange {
  std::optional<PartBoxes> source;
  std::optional<PartBoxes> target;
  std::vector<std::vector<spmd::Box>> sends;
  std::vector<std::vector<spmd::Box>> receives;
  c10::DimVector sizes = {};  // of the whole tensor, the same on every rank
};

/// The target's local tensor; undefined where there is none. `local` is undefined where there is no source.
at::Tensor exchange_boxes(const at::Tensor& local, const Group& group, Exchange exchange,
                          const at::TensorOptions& options, StartedStep* started = nullptr);

}  // namespace serried::detail
