// One collective as this rank calls it, and what a backend of ours does with it.
#pragma once

#include "serried/comm/collectives/watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

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

  bool is_point_to_point() const { return kind == watch::Kind::send || kind == watch::Kind::recv; }
};

/// What a backend can do by itself. The door (door.h) does the rest around it.
struct Capabilities {
  bool takes_collectives = false;    // Carrier::run and start: any dtype, any reduction, pieces of any size
  at::DeviceType device = at::kCPU;  // of the tensors in them
  bool checks_nan = false;           // Carrier::set_nan_check
};

/// Mixed into the c10d::Backends of ours.
class Carrier {
 public:
  virtual ~Carrier() = default;

  virtual Capabilities capabilities() const = 0;
  /// Blocks until this rank may use its outputs and reuse its inputs; on the calling thread, without a Work.
  virtual void run(const Collective& collective);
  /// Outputs may be used once the Work has been waited for; until then the Work keeps the tensors alive.
  virtual WorkPtr start(const Collective& collective);
  virtual void set_nan_check(watch::NanCheck mode);
};

/// Null where `backend` is not one of ours.
Carrier* find_carrier(c10d::Backend& backend);

/// Those of `backend`, none where it is not one of ours.
Capabilities capabilities_of(c10d::Backend& backend);

}  // namespace serried::detail
