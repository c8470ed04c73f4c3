// The fallback that every op on a DTensor reaches, and what it tells about itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <vector>

namespace serried {

/// Counters of this thread since it began, or since `reset_dispatch_stats`.
struct DispatchStats {
  uint64_t hits = 0;      // plans found in the cache
  uint64_t misses = 0;    // plans made
  uint64_t defaults = 0;  // calls that took the replicate default for want of a rule
};
DispatchStats dispatch_stats();
void reset_dispatch_stats();
/// Forgets all plans of this thread.
void clear_dispatch_cache();

}  // namespace serried
