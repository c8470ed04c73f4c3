// Counts the memory of tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace serried::testing {

/// Bytes of tensors that this thread has made since and that are alive, and how many of them there were at most.
struct TensorBytes : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    now += size;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

}  // namespace serried::testing
