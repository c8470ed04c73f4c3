// A collective on its way: told to observers, and a span of the trace.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/base/trace.h"
#include "serried/comm/collectives/observe.h"

namespace serried::detail {

/// Made at the start of every kernel that communicates; `name` must be a string literal.
class Started {
 public:
  Started(const char* name, const at::Tensor& x, const Group& group)
      : Started(name, x.numel() * int64_t(x.itemsize()), group) {}
  Started(const char* name, int64_t bytes, const Group& group) : span_(name, "comm", bytes) {
    observe::started(name, bytes < 0 ? 0 : bytes, group);
  }

 private:
  trace::Span span_;
};

}  // namespace serried::detail
