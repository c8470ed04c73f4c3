// The parameters of one owner and one dtype, which travel in one broadcast.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/zero/partition.h"

namespace serried::detail {

struct ZeroBucket {
  int owner = 0;
  std::vector<at::Tensor> parameters;
  at::Tensor flat = {};                // of all their values, where they live in it
  std::vector<at::Tensor> slots = {};  // the place of each in `flat`
};

/// One bucket per owner, dtype and device; owners ascend, parameters keep their order.
std::vector<ZeroBucket> make_zero_buckets(const std::vector<at::Tensor>& parameters, const ZeroPartition& partition);

/// Moves the parameters into one flat tensor that the group can reach: they become views of it, their values stay.
void lay_flat(ZeroBucket& bucket, const Group& group);

/// The owner's values on every rank. Parameters that lay flat and were given other memory since, as torch::load does,
/// are laid flat again.
void broadcast_from_owner(ZeroBucket& bucket, const Group& group);

/// The same by copies, without waiting: the future completes when the parameters here have the owner's values.
c10::intrusive_ptr<c10::ivalue::Future> start_broadcast(const ZeroBucket& bucket, const Group& group);

}  // namespace serried::detail
