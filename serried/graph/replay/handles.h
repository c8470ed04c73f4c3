// How many handles there are of what a function finds by itself: one more or less may be an optimizer's new parameter.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// No op shows which tensors a variable, a module or an optimizer of torch::optim holds, but who takes or drops one
/// changes its number of handles. Such a change need not mean anything: one more recording tells.
class HandleCounts {
 public:
  HandleCounts() = default;
  /// As they are now, of what `recording` found by itself.
  explicit HandleCounts(const Recording& recording);

  /// Those of `other` are fine too.
  void add(const HandleCounts& other);

  /// Whether there are as many as there were at one of those times. Tensors that are gone do not count.
  bool hold() const;
  std::string why_not() const;

 private:
  struct Counted {
    WeakTensor tensor;
    c10::SmallVector<size_t, 2> counts;

    bool holds() const;
  };
  std::vector<Counted> tensors_;
};

}  // namespace serried::graph
