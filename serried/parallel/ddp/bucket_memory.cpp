// Pieces are made on first use, so that a model of one dtype has one.
#include "serried/parallel/ddp/bucket_memory.h"

#include <ATen/ops/empty.h>

#include "serried/base/log.h"
#include "serried/parallel/ddp/dtensor_parameters.h"

namespace serried::detail {
namespace {

constexpr int64_t kAlignment = 64;  // elements: a cache line or more for every dtype

int64_t aligned(int64_t num_elements) {
  return (num_elements + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

at::Tensor allocate_for(const Group& group, int64_t num_elements, const at::TensorOptions& options) {
  const auto backend = group->getBackend(options.device().type());
  if (backend->supportsTensorAlloc(options.device().index())) {
    try {
      return backend->allocateTensor(num_elements, options);
    } catch (const c10::Error& error) {
      log::line(log::Topic::comm, num_elements,
                " elements of buckets in ordinary memory: ", error.what_without_backtrace());
    }
  }
  return at::empty({num_elements}, options);
}

BucketMemory::BucketMemory(const std::vector<ManagedParameter>& parameters, Group group,
                           std::optional<at::ScalarType> floating_dtype)
    : group_(std::move(group)), floating_dtype_(floating_dtype) {
  for (const ManagedParameter& parameter : parameters) {
    if (parameter.sparse_gradient) continue;
    capacities_[dtype_for(parameter.tensor)] += aligned(part_of(parameter.tensor).numel());
  }
}

at::ScalarType BucketMemory::dtype_for(const at::Tensor& parameter) const {
  return floating_dtype_ && parameter.is_floating_point() ? *floating_dtype_ : parameter.scalar_type();
}

at::Tensor BucketMemory::take(int64_t num_elements, const at::Tensor& parameter) {
  const at::ScalarType dtype = dtype_for(parameter);
  at::Tensor& piece = pieces_[dtype];
  if (!piece.defined()) {
    const at::TensorOptions options = part_of(parameter).options().requires_grad(false).dtype(dtype);
    piece = allocate_for(group_, capacities_.at(dtype), options);
  }
  int64_t& taken = taken_[dtype];
  const at::Tensor flat = piece.narrow(0, taken, num_elements);
  taken += aligned(num_elements);
  return flat;
}

}  // namespace serried::detail
