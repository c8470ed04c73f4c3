// Step counts that optimizers of torch::optim keep on the host: no op advances them, so replays have to.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// The counts of listed optimizers when a recording begins.
class OptimizerSteps {
 public:
  explicit OptimizerSteps(const std::vector<torch::optim::Optimizer*>& optimizers);

  /// Replays count on as the recorded function has done since.
  void repeat_at_replays(Recorder& recorder) const;

 private:
  using Parameter = std::pair<torch::optim::Optimizer*, const void*>;
  using Counts = std::map<Parameter, int64_t>;

  static Counts counts_of(const std::vector<torch::optim::Optimizer*>& optimizers);

  std::vector<torch::optim::Optimizer*> optimizers_;
  Counts before_;
};

}  // namespace serried::graph
