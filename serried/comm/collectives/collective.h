// One collective as this rank calls it.
#pragma once

#include "serried/comm/collectives/watch.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>

namespace serried::detail {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Described once, for hooks, errors and backends alike. Tensors are contiguous and borrowed for the call. One tensor
/// on a side is all of it, or equal pieces that lie in it in a row; one for each rank are pieces, whose sizes may
/// differ.
struct Collective {
  watch::Kind kind = watch::Kind::none;
  const char* where = "";  // the call that errors speak of
  at::TensorList inputs = {};
  at::TensorList outputs = {};  // may be the inputs
  const c10d::ReduceOp* op = nullptr;
  int root = -1;  // or the peer of send and recv
  int tag = 0;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;  // unset: the group's
  uint32_t sizes_of_all = 0;                                // watch::hash_sizes; 0: not known, or all ranks' are alike
  at::IntArrayRef rows = {};  // of an all_gather: where rows of the one input go in the one output (rows.h)

  bool is_point_to_point() const { return kind == watch::Kind::send || kind == watch::Kind::recv; }
};

}  // namespace serried::detail
