// What a call leaves behind besides its results: gradients of parameters and version counts.
#pragma once

#include <vector>

#include "serried/graph/program.h"
#include "serried/graph/recorder.h"
#include "serried/tensor/spec.h"

namespace serried::graph {

/// .grad of the leaves that a recording met, before it ran.
struct GradientState {
  WeakTensor parameter;
  bool had_grad;
  WeakTensor grad;  // weak, lest the recording keep old gradients alive
};
std::vector<GradientState> gradients_of(const std::vector<Resident>& residents);

class Effects {
 public:
  Effects() = default;
  /// Reads the state right after the recorded call; adds the gradients to the recording's graph. `before` is the state
  /// right before it.
  Effects(Recorder& recorder, const std::vector<GradientState>& before);

  /// Leaves the state that eager would have left.
  void apply(const Program& program) const;

  /// What .grad has to be before a call for the graph to be right; empty where it is.
  std::string why_not() const;
  bool hold() const;

 private:
  /// A gradient that the call gives.
  struct Given {
    WeakTensor parameter;
    ValueId value = kNoValue;  // computed anew
    SpecPtr spec = {};         // of a DTensor
    at::Tensor kept = {};      // the same tensor every time
  };
  /// A gradient that the call reads, or that must be missing when it begins.
  struct Expected {
    WeakTensor parameter;
    at::Tensor grad;

    bool holds() const;
  };
  struct Bumped {
    WeakTensor tensor;
    uint32_t count;
  };
  void add_gradient(Recorder& recorder, const at::Tensor& parameter, const GradientState& before);

  std::vector<Given> given_;
  std::vector<Expected> expected_;
  std::vector<Bumped> bumped_;
};

}  // namespace serried::graph
