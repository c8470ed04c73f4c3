// Which parameters share a bucket: arithmetic only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "serried/parallel/ddp/options.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {

inline constexpr size_t kFirstBucketBytes = 1 << 20;
inline constexpr size_t kBucketBytesCap = size_t(25) << 20;

/// Indices of parameters per bucket, in the order in which buckets are reduced.
using BucketAssignment = std::vector<std::vector<size_t>>;

/// Bytes at which a bucket is closed, one per bucket, the last repeats.
struct BucketLimits {
  std::vector<size_t> initial;  // before the order of gradients is known
  std::vector<size_t> rebuilt;  // after
};

/// ValueError for a cap that is not positive.
BucketLimits bucket_limits(const DistributedDataParallelOptions& options);

/// Parameters from the last to the first, as backward will probably meet them.
BucketAssignment initial_buckets(const std::vector<ManagedParameter>& parameters, const BucketLimits& limits);

/// Parameters in the order in which their gradients came.
BucketAssignment rebuilt_buckets(const std::vector<ManagedParameter>& parameters, const BucketLimits& limits,
                                 const std::vector<size_t>& arrival);

}  // namespace serried::detail
