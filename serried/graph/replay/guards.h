// What must hold for a captured graph to stand for its function again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/graph/record/call.h"
#include "serried/graph/record/recorder.h"
#include "serried/tensor/spec.h"

namespace serried::graph {

/// How this thread computes: what else decides which ops run.
struct Ambient {
  bool grad_mode;
  bool inference_mode;
  bool autocast;
  at::ScalarType autocast_dtype;
  at::ScalarType default_dtype;
  bool deterministic;
  const c10d::ProcessGroup* group;  // the current one
  uint64_t mesh;                    // of the current mesh, 0: none
  static Ambient here();
  bool operator==(const Ambient&) const = default;
};

/// A tensor argument as the graph was recorded with it.
struct InputFacts {
  bool is_defined = false;
  TensorMeta meta = {};
  bool requires_grad = false;
  bool is_leaf = true;   // of one that requires gradients
  int same_as = -1;      // an earlier argument that is the same tensor
  int shares_with = -1;  // the first argument that has memory in common with it
  int64_t distance = 0;  // from that one, in bytes
  SpecPtr spec = {};     // of a DTensor
  bool is_stale = false;
};

/// Conditions on arguments and surroundings: known before a call runs.
class CallGuards {
 public:
  explicit CallGuards(const CallArguments& arguments);
  /// Cheap; `why_not` says what it was.
  bool hold(const CallArguments& arguments) const;
  /// "input 0 sizes were [8, 64] and are [4, 64]"; empty where they hold.
  std::string why_not(const CallArguments& arguments) const;
  std::vector<Guard> list() const;

 private:
  std::vector<InputFacts> inputs_;
  const void* types_;
  std::vector<std::string> constants_;
  std::vector<WatchedText> watched_;
  Ambient ambient_;
};

/// Conditions on what the function found by itself: parameters, groups, and what code reported with rely_on.
class StateGuards {
 public:
  /// `replayable` is the recording that the graph was made of.
  explicit StateGuards(const Recording& replayable);
  bool hold() const;
  /// False once something that the graph needs is gone for good.
  bool may_hold_again() const;
  std::string why_not() const;
  std::vector<Guard> list() const;

 private:
  struct FoundTensor {  // must still be where it was
    WeakTensor tensor;
    Place place;
    bool requires_grad;
    WeakHistory history;
    std::string text;
    bool is_there() const;
    std::string why_not() const;
  };
  struct LiveGroup {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::string text;
  };

  std::vector<FoundTensor> tensors_;
  std::vector<LiveGroup> groups_;
  std::vector<WeakGenerator> generators_;
  std::vector<LiveObject> objects_;
  std::vector<RecordedFact> facts_;
};

/// Whether the inputs of a call share memory with each other and with the surroundings as those of the recordings did.
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
