// Lays gradients side by side.
#include "serried/parallel/ddp/bucket.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "serried/base/log.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {
namespace {

// The memory of `flat` as a tensor of its own. Not an autograd view: users call detach_() on gradients
// (zero_grad(set_to_none = false) does), which a view forbids.
at::Tensor alias_at(const at::Tensor& flat, size_t offset, const at::Tensor& like) {
  c10::DimVector strides(like.strides());
  if (!like.is_non_overlapping_and_dense()) {
    int64_t next = 1;
    for (int64_t d = like.dim() - 1; d >= 0; --d) {
      strides[d] = next;
      next *= std::max<int64_t>(like.size(d), 1);
    }
  }
  at::Tensor alias = at::empty({0}, flat.options());
  alias.set_(flat.storage(), flat.storage_offset() + int64_t(offset), like.sizes(), strides);
  return alias;
}

constexpr int64_t kAlignment = 64;  // elements: a cache line or more for every dtype

int64_t aligned(int64_t num_elements) {
  return (num_elements + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t Bucket::num_bytes(const std::vector<ManagedParameter>& parameters) const {
  int64_t bytes = 0;
  for (size_t index : members) bytes += int64_t(part_of(parameters[index].tensor).nbytes());
  return bytes;
}

Bucket make_bucket(std::vector<size_t> members, const std::vector<ManagedParameter>& parameters, BucketMemory& memory) {
  at::NoGradGuard no_grad;
  Bucket bucket;
  bucket.members = std::move(members);
  const ManagedParameter& first = parameters[bucket.members.at(0)];
  bucket.sparse = first.sparse_gradient;
  if (bucket.sparse) return bucket;
  size_t offset = 0;
  for (size_t index : bucket.members) {
    bucket.offsets.push_back(offset);
    bucket.lengths.push_back(size_t(part_of(parameters[index].tensor).numel()));
    offset += bucket.lengths.back();
  }
  bucket.flat = memory.take(int64_t(offset), first.tensor);
  for (size_t i = 0; i < bucket.members.size(); ++i) {
    const at::Tensor& parameter = parameters[bucket.members[i]].tensor;
    bucket.views.push_back(alias_at(bucket.flat, bucket.offsets[i], part_of(parameter)));
    if (bucket.flat.scalar_type() != parameter.scalar_type()) continue;
    bucket.gradients.push_back(as_gradient(bucket.views.back(), parameter));
  }
  return bucket;
}

bool is_same_memory(const at::Tensor& gradient, const at::Tensor& view) {
  if (gradient.is_same(view)) return true;
  return gradient.layout() == at::kStrided && gradient.data_ptr() == view.data_ptr() &&
         gradient.strides() == view.strides();
}

c10d::GradBucket as_grad_bucket(const Bucket& bucket, size_t index, size_t count,
                                const std::vector<ManagedParameter>& parameters,
                                std::optional<at::Tensor> sparse_rows) {
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> tensors;
  for (size_t member : bucket.members) {
    tensors.push_back(part_of(parameters[member].tensor));
    sizes.push_back(tensors.back().sizes());
  }
  return c10d::GradBucket(index, count, bucket.flat, bucket.offsets, bucket.lengths, std::move(sizes),
                          std::move(tensors), std::move(sparse_rows));
}

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
