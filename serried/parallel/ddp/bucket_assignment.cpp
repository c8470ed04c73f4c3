// The limits are ours, the walk is c10d's own.
#include "serried/parallel/ddp/bucket_assignment.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

size_t cap_bytes(double mebibytes) {
  if (mebibytes > 0) return size_t(mebibytes * 1024 * 1024);
  raise<c10::ValueError>({"DistributedDataParallel", c10::str("a bucket of ", mebibytes, " MiB holds nothing"),
                          "pass a bucket_cap_mb above 0, or none for 25"});
}

BucketAssignment assign(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& limits,
                        const std::vector<bool>& sparse, const std::vector<int64_t>& indices) {
  return std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, limits, sparse, indices));
}

}  // namespace

BucketLimits bucket_limits(const DistributedDataParallelOptions& options) {
  if (!options.bucket_caps_mb.empty()) {
    std::vector<size_t> caps;
    for (double cap : options.bucket_caps_mb) caps.push_back(cap_bytes(cap));
    return {.initial = caps, .rebuilt = caps};
  }
  std::vector<size_t> caps = {kFirstBucketBytes, kBucketBytesCap};
  if (options.bucket_cap_mb) caps = {cap_bytes(*options.bucket_cap_mb)};
  // Buckets that will be rebuilt need no cuts yet: the first iteration is one reduction.
  const bool will_rebuild = options.static_graph || !options.find_unused_parameters;
  if (will_rebuild) return {.initial = {std::numeric_limits<size_t>::max()}, .rebuilt = caps};
  return {.initial = caps, .rebuilt = caps};
}

BucketAssignment initial_buckets(const std::vector<ManagedParameter>& parameters, const BucketLimits& limits) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  for (const ManagedParameter& parameter : parameters) {
    tensors.push_back(parameter.tensor);
    sparse.push_back(parameter.sparse_gradient);
  }
  BucketAssignment buckets = assign(tensors, limits.initial, sparse, {});
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

BucketAssignment rebuilt_buckets(const std::vector<ManagedParameter>& parameters, const BucketLimits& limits,
                                 const std::vector<size_t>& arrival) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse(parameters.size());
  std::vector<int64_t> indices;
  for (size_t index : arrival) {
    tensors.push_back(parameters[index].tensor);
    sparse[index] = parameters[index].sparse_gradient;
    indices.push_back(int64_t(index));
  }
  return assign(tensors, limits.rebuilt, sparse, indices);
}

}  // namespace serried::detail
