// Copies in and out of a flat tensor, or no copies where the parameters live in it.
#include "serried/parallel/zero/bucket.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <map>
#include <tuple>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/ddp/bucket.h"

namespace serried::detail {
namespace {

int64_t num_elements(const ZeroBucket& bucket) {
  int64_t count = 0;
  for (const at::Tensor& parameter : bucket.parameters) count += parameter.numel();
  return count;
}

// Of one element type, which `module->to(dtype)` of a part may have changed since the buckets were made.
at::TensorOptions options_of(const ZeroBucket& bucket) {
  const at::Tensor& first = bucket.parameters.at(0);
  for (const at::Tensor& parameter : bucket.parameters) {
    if (parameter.scalar_type() == first.scalar_type()) continue;
    raise<c10::ValueError>({kZero,
                            c10::str("parameters that had one dtype now are ", watch::describe_tensor(first), " and ",
                                     watch::describe_tensor(parameter)),
                            "convert the module before the optimizer is made"});
  }
  return at::TensorOptions().dtype(first.scalar_type()).device(first.device());
}

// In logical order, so that ranks may differ in memory format.
std::vector<at::Tensor> slots_in(const at::Tensor& flat, const ZeroBucket& bucket) {
  std::vector<at::Tensor> slots;
  int64_t offset = 0;
  for (const at::Tensor& parameter : bucket.parameters) {
    slots.push_back(flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
  return slots;
}

bool lies_flat(const ZeroBucket& bucket) {
  for (size_t i = 0; i < bucket.slots.size(); ++i) {
    if (bucket.parameters[i].const_data_ptr() != bucket.slots[i].const_data_ptr()) return false;
  }
  return true;
}

// The memory that travels, filled where the values come from.
at::Tensor packed(const ZeroBucket& bucket, int rank) {
  const at::Tensor flat = at::empty({num_elements(bucket)}, options_of(bucket));
  if (bucket.owner != rank) return flat;
  const std::vector<at::Tensor> slots = slots_in(flat, bucket);
  for (size_t i = 0; i < slots.size(); ++i) slots[i].copy_(bucket.parameters[i]);
  return flat;
}

void unpack(const at::Tensor& flat, const ZeroBucket& bucket, int rank) {
  if (bucket.owner == rank) return;
  const std::vector<at::Tensor> slots = slots_in(flat, bucket);
  for (size_t i = 0; i < slots.size(); ++i) bucket.parameters[i].copy_(slots[i]);
}

void broadcast_copies(const ZeroBucket& bucket, const Group& group) {
  const at::Tensor flat = packed(bucket, group->getRank());
  broadcast_(flat, group, {.src = bucket.owner});
  unpack(flat, bucket, group->getRank());
}

void broadcast_in_place(const ZeroBucket& bucket, const Group& group) {
  broadcast_(bucket.flat, group, {.src = bucket.owner});
  if (bucket.owner == group->getRank()) return;
  // Autograd must refuse a backward through values from before the step here too, as it does at the owner.
  for (const at::Tensor& parameter : bucket.parameters) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

std::vector<ZeroBucket> make_zero_buckets(const std::vector<at::Tensor>& parameters, const ZeroPartition& partition) {
  std::map<std::tuple<int, at::ScalarType, c10::DeviceType, int>, ZeroBucket> buckets;
  for (const at::Tensor& parameter : parameters) {
    const int owner = partition.owner_of(parameter.unsafeGetTensorImpl());
    const c10::Device device = parameter.device();
    ZeroBucket& bucket = buckets[{owner, parameter.scalar_type(), device.type(), device.index()}];
    bucket.owner = owner;
    bucket.parameters.push_back(parameter);
  }
  std::vector<ZeroBucket> list;
  for (auto& [key, bucket] : buckets) list.push_back(std::move(bucket));
  return list;
}

void lay_flat(ZeroBucket& bucket, const Group& group) {
  at::NoGradGuard no_grad;
  bucket.flat = allocate_for(group, num_elements(bucket), options_of(bucket));
  bucket.slots = slots_in(bucket.flat, bucket);
  for (size_t i = 0; i < bucket.slots.size(); ++i) {
    bucket.slots[i].copy_(bucket.parameters[i]);
    bucket.parameters[i].set_data(bucket.slots[i]);
  }
}

void broadcast_from_owner(ZeroBucket& bucket, const Group& group) {
  if (group->getSize() == 1) return;
  at::NoGradGuard no_grad;
  if (!bucket.flat.defined()) return broadcast_copies(bucket, group);
  if (!lies_flat(bucket)) lay_flat(bucket, group);
  broadcast_in_place(bucket, group);
}

c10::intrusive_ptr<c10::ivalue::Future> start_broadcast(const ZeroBucket& bucket, const Group& group) {
  at::NoGradGuard no_grad;
  const int rank = group->getRank();
  const at::Tensor flat = packed(bucket, rank);
  return ops::start_broadcast_(flat, group, bucket.owner)
      ->getFuture()
      ->then(
          [flat, bucket, rank](c10::ivalue::Future& done) -> c10::IValue {
            done.value();  // raises what went wrong
            at::NoGradGuard no_grad;
            unpack(flat, bucket, rank);
            return flat;
          },
          c10::TensorType::get());
}

}  // namespace serried::detail
