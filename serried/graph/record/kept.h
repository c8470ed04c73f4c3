// Finds tensors that a function has left with its surroundings: a replay would leave none there.
#pragma once

#include <unordered_map>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

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
