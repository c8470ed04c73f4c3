// What a call leaves behind besides its results: gradients of parameters and version counts.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "serried/graph/record/recorder.h"
#include "serried/graph/replay/program.h"
#include "serried/tensor/spec.h"

namespace serried::graph {

/// .grad of the leaves that a recording met, before it ran.
struct GradientState {
  WeakTensor parameter;
  bool had_grad;
  WeakTensor grad;  // weak, lest the recording keep old gradients alive
  WeakTensor part;  // of a DTensor, else the same: ops may keep it when the DTensor is gone
  SpecPtr spec;     // of a DTensor
  // Of the part, where it is dense.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  TensorMeta meta = {};
  bool owns_memory = false;  // all of its storage: no view of a bucket
  size_t num_handles = 1;    // more than its parameter's: the function may have met it in other hands

  /// The part, or what an op was given of it before it went: undefined where nobody keeps its memory.
  at::Tensor remaining_part() const;
  /// Whether a function that found this one and finds `now` may be expected to run the same ops.
  bool is_like(const at::Tensor& now) const;
};
std::vector<GradientState> gradients_of(const std::vector<OuterTensor>& outer_tensors);
/// Whether the same gradients are defined now, and lie as they did.
bool same_gradients(const std::vector<GradientState>& before);

/// A leaf whose gradient a call changes: a parameter, or an argument of the function.
struct Leaf {
  WeakTensor tensor;
  int argument = -1;  // another tensor at each call

  at::Tensor in(const std::vector<at::Tensor>& arguments) const {
    return argument < 0 ? tensor.lock() : arguments[size_t(argument)];
  }
};

class Effects {
 public:
  Effects() = default;
  /// Reads the state right after the recorded call; adds the gradients to the recording's graph. `before` is the state
  /// right before it. A gradient that the call adds to, and that is no part of other memory, becomes one more input of
  /// the graph: it may be another tensor after the next zero_grad().
  Effects(Recorder& recorder, const std::vector<GradientState>& before, const std::vector<at::Tensor>& arguments);

  /// Gradients that no node needs after the passes are no inputs any more: zero_grad() often looks at one last.
  void drop_unused(Graph& graph);

  /// What the graph's inputs are in a call with `arguments`: those, and behind them the gradients it adds to.
  std::vector<at::Tensor> inputs_of(const std::vector<at::Tensor>& arguments) const;

  /// Before a run: gradients that it computes anew free their memory, as zero_grad() inside of the function did.
  void free_gradients(const std::vector<at::Tensor>& inputs) const;

  /// Leaves the state that eager would have left. `inputs` are those of the run.
  void apply(const Program& program, const std::vector<at::Tensor>& inputs) const;

  /// After a run that failed: what lies in gradients may be half of this step and half of the last.
  void drop_gradients(const std::vector<at::Tensor>& inputs) const;

  /// What .grad has to be before a call for the graph to be right; empty where it is.
  std::string why_not(const std::vector<at::Tensor>& arguments) const;
  bool hold(const std::vector<at::Tensor>& arguments) const;
  bool has_inputs() const { return !added_.empty(); }

 private:
  /// A gradient that the call gives.
  struct Given {
    Leaf leaf;
    ValueId value = kNoValue;  // computed anew
    uint32_t version = 0;      // then; of an alias of an input: more than that one's
    int alias_of = -1;         // an input, such as after Module::zero_grad, which puts grad.detach() in its place
    SpecPtr spec = {};         // of a DTensor
    at::Tensor kept = {};      // the same tensor every time
  };
  /// A gradient that the call reads, or that must be missing when it begins.
  struct Expected {
    Leaf leaf;
    bool is_defined;
    WeakTensor grad;

    bool holds(const std::vector<at::Tensor>& arguments) const;
  };
  /// A gradient that is an input of the graph.
  struct Added {
    Leaf leaf;
    TensorMeta meta;
    SpecPtr spec = {};
    // The function may have found it by them: they must come along.
    std::vector<WeakTensor> sharers;  // in its memory
    size_t num_handles = 1;           // of it, when the call began
    bool is_used = true;

    bool holds(const std::vector<at::Tensor>& arguments) const;
    bool is_held_as_before(const at::Tensor& grad) const;
  };
  /// A gradient that lies in the memory of an argument.
  struct Shared {
    Leaf leaf;
    size_t argument;
    int64_t distance;  // in bytes

    bool holds(const std::vector<at::Tensor>& arguments) const;
  };
  struct Bumped {
    WeakTensor tensor;
    uint32_t count;
    int input = -1;  // then this one of the call's inputs, or its part
    bool is_part = false;

    at::Tensor in(const std::vector<at::Tensor>& inputs) const;
  };
  /// `input` is the number of the gradient among the graph's inputs, -1: none.
  void add_gradient(Recorder& recorder, const Leaf& leaf, const GradientState& state, int input);
  void add_shared(const Leaf& leaf, const GradientState& state, const std::vector<at::Tensor>& arguments);
  void count_from_input(const Recorder& recorder, const Value& value, int input, Given& given) const;
  int add_input(Recorder& recorder, const Leaf& leaf, const GradientState& state, const std::set<int32_t>& shared);
  void add_bump(const OuterTensor& outer);
  void give(const Program& program, const std::vector<at::Tensor>& inputs) const;
  void bump(const std::vector<at::Tensor>& inputs) const;

  std::vector<Given> given_;
  std::vector<Expected> expected_;
  std::vector<Added> added_;
  std::vector<Shared> shared_;
  size_t first_added_ = 0;  // among the inputs of the graph
  std::vector<Bumped> bumped_;
};

}  // namespace serried::graph
