// Who holds tensors, by the number of their handles: of what a function finds by itself one more or less may be an
// optimizer's new parameter; of what it makes or is given, one that it has left with its surroundings.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Of all who own it, less the one that autograd takes of a leaf while a graph lives.
size_t num_handles(const WeakTensor& tensor);

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
  template <class Weak>
  struct Counted {
    Weak object;
    c10::SmallVector<size_t, 2> counts;

    bool holds() const;
    void add(const std::vector<Counted>& more);
  };
  std::vector<Counted<WeakTensor>> tensors_;
  std::vector<Counted<WeakGenerator>> generators_;
};

/// How many handles the arguments have when a call begins; not looked at where ranks are threads.
class ArgumentHandles {
 public:
  explicit ArgumentHandles(const std::vector<at::Tensor>& arguments);

  /// Of what the recorded call made, and of its arguments, all with more handles than before that neither `results`,
  /// gradients nor views explain. Results have two handles for each time they stand in there, and no history.
  std::vector<KeptTensor> kept_now(const Recorder& recorder, const std::vector<at::Tensor>& results) const;

 private:
  struct Argument {
    WeakTensor tensor;
    size_t handles;
    size_t number;
  };
  std::vector<Argument> arguments_;
};

/// CaptureError where somebody holds one of `recording.kept` still.
void refuse_kept(const Recording& recording);

}  // namespace serried::graph
