// Whether the inputs of a call share memory with each other and with the surroundings as those of the recordings did.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "serried/graph/record/inputs.h"

namespace serried::graph {

class Sharing {
 public:
  explicit Sharing(const Recording& replayable);

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
