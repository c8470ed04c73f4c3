// Writes down what a function does to tensors while it runs.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/graph/error.h"
#include "serried/graph/graph.h"
#include "serried/graph/record/generator_watch.h"
#include "serried/graph/record/hooks.h"
#include "serried/graph/record/phases.h"
#include "serried/graph/record/place.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/weak_tensor.h"

namespace serried::graph {

/// A value that left the tensors: item(), equal(), a condition on data.
struct HostRead {
  std::string op;
  size_t before_node;  // index of the next node recorded
};

/// A tensor that lived before the function ran, as its users hold it: an argument, or one of the surroundings.
struct OuterTensor {
  WeakTensor tensor;
  ValueId value;     // of its part, for a DTensor; kNoValue where no op met that
  uint32_t version;  // when first met
  bool had_grad;     // then
  WeakTensor grad;
  Place place;              // then
  bool required_grad;       // then
  WeakHistory history;      // then
  int input = -1;           // of the graph, and so another tensor at each call; -1: none
  bool is_alias = false;    // of what an op made: mostly made inside too
  bool is_lasting = false;  // met by the recording before as well

  bool was_found = false;  // by the function itself, in the recording before

  bool is_of_surroundings() const { return was_found || (input < 0 && (!is_alias || is_lasting)); }
};

/// A fact that the function relied on, and how it was when the call began.
struct RecordedFact {
  tape::Fact fact;
  uint64_t value;

  bool holds() const { return fact.value() == value; }
  bool is_about(const tape::Fact& other) const;
};

bool all_hold(const std::vector<RecordedFact>& facts);

/// An object whose answers the function relied on.
struct LiveObject {
  std::string name;
  std::weak_ptr<const void> object;
};

/// A result of an op, when it was made.
struct MadeTensor {
  WeakTensor tensor;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  ValueId value;
};

/// An argument of a call, or what the call made, that somebody seemed to hold on to at its end.
struct KeptTensor {
  WeakTensor tensor;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  ValueId value;
  int argument = -1;                          // -1: made
  size_t explained = 0;                       // handles whose holder is known
  std::optional<size_t> tensors_explained{};  // in its memory; none where the call did not make that

  bool is_kept() const;
};

/// One run of a function, before it is trusted.
struct Recording {
  Graph graph;
  std::vector<ValueId> externals;  // met first as operands: persistent or constant, a second recording tells
  std::vector<ValueId> views;      // of memory that was known, made without an op
  std::vector<InputPlace> inputs;  // of the graph
  std::vector<OuterTensor> outer_tensors;
  std::vector<HostRead> host_reads;
  std::vector<KeptTensor> kept;
  std::vector<RecordedFact> facts;
  std::vector<LiveObject> objects;
  std::vector<std::function<void()>> before_replay;
  std::vector<std::function<void()>> after_replay;
  std::vector<Group> groups;                   // of its collectives, in the order of first use
  std::vector<std::string> together = {};      // names of groups whose ranks begin to replay in the same call
  std::vector<WeakGenerator> generators = {};  // of users, that its ops draw from, likewise
  GraphHooks hooks;                            // of users, in the order of their calls
  std::string hook_left_on = {};               // a tensor of its surroundings that has one more hook now; empty: none
  bool ran_backward = false;
};

class Recorder final : public tape::Recorder {
 public:
  /// Undefined arguments are skipped, of DTensors the parts are taken. `known` are facts that earlier recordings relied
  /// on, with their values now: a function may change one on its way before it relies on it.
  explicit Recorder(const std::vector<at::Tensor>& arguments, std::vector<RecordedFact> known = {});
  ~Recorder() override;
  Recorder(const Recorder&) = delete;

  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void rely_on(tape::Fact fact) override;
  /// As rely_on, of a fact as it is now.
  void rely_on_now(tape::Fact fact);
  void rely_on_life(const std::string& name, std::weak_ptr<const void> object) override;
  void meet(c10::TensorImpl* dtensor) override;
  void replay_together(const std::string& group) override;
  void before_replay(std::function<void()> action) override { recording_.before_replay.push_back(std::move(action)); }
  void after_replay(std::function<void()> action) override { recording_.after_replay.push_back(std::move(action)); }

  /// Calls a user's hook on a gradient, as a node.
  at::Tensor call_hook(std::shared_ptr<const TensorHook> fn, const at::Tensor& grad);
  /// A user is about to put a hook on `t`.
  void note_hooks_before(const at::Tensor& t);

  /// The value that `t` is, kNoValue if undefined; unknown tensors become external values.
  ValueId find(const at::Tensor& t);
  /// As find, but kNoValue for tensors that no op has met.
  ValueId find_known(const at::Tensor& t) const;
  /// Whether an op gave `t` the memory, sizes and strides that it has.
  bool is_as_ops_left(const at::Tensor& t) const;

  /// What `before` met too was not made inside.
  void note_lasting(const Recording& before);
  /// An external value that each call brings along: `t` in this one.
  void make_input(ValueId id, const at::Tensor& t);

  const std::vector<OuterTensor>& outer_tensors() const { return recording_.outer_tensors; }
  const std::vector<HostRead>& host_reads() const { return recording_.host_reads; }
  /// By its ops.
  const std::vector<MadeTensor>& made() const { return made_; }
  /// Storages, by number, that somebody may hold for a good reason: of collectives whose Work is there, and of what
  /// hooks of users were given, which replays give them too.
  std::unordered_set<int32_t> storages_handed_out() const;
  ValueId input(size_t number) const { return recording_.graph.inputs().at(number); }
  void note_kept(std::vector<KeptTensor> kept) { recording_.kept = std::move(kept); }
  /// Of the collectives so far; also after `take`.
  const std::vector<Group>& groups() const { return recording_.groups; }
  /// What was recorded; ends the recorder's use. CaptureError for hooks on arguments, and as raise_refusal.
  Recording take();
  Graph& graph() { return recording_.graph; }
  const Value& value(ValueId id) const { return recording_.graph.value(id); }
  const std::vector<Value>& values() const { return recording_.graph.values(); }
  /// Throws what was met that cannot be replayed; only now, so that the function has run to its end.
  void raise_refusal() const;
  bool ran_backward() const { return recording_.ran_backward; }

 private:
  /// Storage, offset, dtype, flags, dims, sizes and strides in a row; empty where there is none to speak of. Numbers of
  /// up to three dims need no memory of their own: this is made for every operand of every op.
  using Layout = c10::SmallVector<int64_t, 11>;
  struct HashOfLayout {
    size_t operator()(const Layout& layout) const {
      return std::hash<std::string_view>()(
          {reinterpret_cast<const char*>(layout.data()), layout.size() * sizeof(int64_t)});
    }
  };
  struct Known {
    ValueId id;
    Layout layout;  // when an op gave it
  };
  struct Link;  // what a recorded Work keeps of us
  class RecordedWork;

  static Layout layout_of(const at::Tensor& t);
  Argument argument_of(const c10::IValue& value);
  Argument argument_of(const at::Generator& generator);
  void add_group(const Group& group);
  bool has_memory_of(const at::Tensor& t, ValueId id) const;
  void note_layout(const at::Tensor& t, Known& known);
  ValueId define(const at::Tensor& t);
  ValueId define_work(c10::IValue& slot);
  ValueId restride(ValueId base, const at::Tensor& t);
  ValueId add_external(const at::Tensor& t);
  void remember(const at::Tensor& t, ValueId id);
  std::vector<ValueId> results_of(c10::IValue& value);
  void note_makers(const Node& node);
  void note_writes(const Node& node);
  void adopt_operands(const Node& node);
  void adopt_results();
  void adopt(ValueId id);
  void refuse(CaptureError::Report report);
  bool refuse_odd(const at::Tensor& t, const std::string& what);
  bool refuse_lazy(const at::Tensor& t);
  void refuse_overlap(const at::Tensor& t);
  void refuse_moved();
  void refuse_other_history();
  void refuse_generator(const std::string& change);
  void note_outer(c10::TensorImpl* impl, ValueId value);
  bool is_made_inside(ValueId id) const;
  std::vector<ValueId> find_all(const std::vector<at::Tensor>& tensors);
  void append(Node node);
  StepMemory step_memory() const;
  bool keep_results(Node& node, torch::jit::Stack& stack);
  void check_supported(const c10::OperatorHandle& op, const Node& node);
  void note_wait(ValueId work);
  void wait_for_all();
  void check_hooks_of_inputs() const;
  void rely_on_hooks();
  void note_hooks_left();

  Recording recording_;
  std::unordered_map<const c10::TensorImpl*, Known> by_impl_;
  std::unordered_map<Layout, ValueId, HashOfLayout> by_layout_;
  std::unordered_map<const c10::StorageImpl*, ValueId> by_storage_;
  std::unordered_set<const c10::TensorImpl*> seen_outer_;
  std::unordered_map<const c10::TensorImpl*, int> arguments_;
  bool all_allocated_ = true;                      // the storages met so far
  std::vector<RecordedFact> known_;                // when the call began
  std::unordered_map<int32_t, size_t> untouched_;  // storages that no op has read or written since the node made them
  std::vector<ValueId> on_their_way_;              // collectives that nobody has waited for
  GeneratorWatch generators_;
  // Weak: they keep addresses from being used again without keeping memory, and autograd may still steal gradients.
  std::vector<WeakTensor> impls_;
  std::vector<MadeTensor> made_;
  struct HookedTensor {
    WeakTensor tensor;
    int64_t num_hooks;  // of users, before the first one
  };
  std::vector<HookedTensor> hooked_;  // by the function
  struct LiveWork {
    std::weak_ptr<const void> life;
    size_t node;  // that gave it
  };
  std::vector<LiveWork> works_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::shared_ptr<Link> link_;
  std::optional<c10::OperatorHandle> running_;
  std::optional<CaptureError> refusal_;
  std::string hooked_input_;  // an argument that came with hooks of a user
};

}  // namespace serried::graph
