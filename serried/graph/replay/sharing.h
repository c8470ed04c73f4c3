// Whether the inputs of a call share memory with each other and with the surroundings as those of the recordings did.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Notes in `second.inputs` what differed between two recordings that agree. A function that finds one of its arguments
/// by itself too looks as if it used the argument twice: so an input counts as one that may change only if it did.
void compare_inputs(const Recording& first, Recording& second);

/// Whether an input of one recording lies in memory that the function found by itself in the other: they need not run
/// the same ops.
bool shares_otherwise(const Recording& a, const Recording& b);

/// Whether `inputs` lie in no memory that the function found by itself in `recording`.
bool is_apart(const Recording& recording, const std::vector<at::Tensor>& inputs);

/// Whether `arguments` lie in the memory that those of `recording` had.
bool has_memory_of_inputs(const Recording& recording, const std::vector<at::Tensor>& arguments);

/// Whether what the function found by itself is where it was.
bool is_in_place(const Recording& recording);

class Sharing {
 public:
  explicit Sharing(const Recording& settled);

  /// `inputs` are those of the graph: arguments, and behind `num_arguments` of them gradients that it adds to.
  bool holds(const std::vector<at::Tensor>& inputs, size_t num_arguments) const;
  std::string why_not(const std::vector<at::Tensor>& inputs, size_t num_arguments) const;
  /// Whether inputs that lie elsewhere are all that is wrong: one more recording may show that they may.
  bool fails_by_place(const std::vector<at::Tensor>& inputs, size_t num_arguments) const;

 private:
  bool are_in_place(const std::vector<at::Tensor>& inputs) const;
  bool is_of_surroundings(const c10::StorageImpl* storage) const;

  std::vector<InputPlace> inputs_;
  std::vector<c10::Storage> surroundings_;  // sorted by address
  bool all_allocated_ = true;               // these
};

}  // namespace serried::graph
