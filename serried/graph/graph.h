// A captured step as a flat list of ops on plain tensors: what a recorder writes, passes rewrite, a program runs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serried/graph/dtensor_layout.h"

namespace serried::graph {

using ValueId = int32_t;
/// Stands for an undefined tensor.
inline constexpr ValueId kNoValue = -1;

/// What is known of a tensor without its data.
struct TensorMeta {
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t offset = 0;  // elements, from the begin of its storage
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;

  int64_t num_bytes() const;
  int64_t storage_end() const;    // bytes, from the begin of its storage to the end of what the tensor sees of it
  std::string to_string() const;  // "f32[4, 8]"
  bool operator==(const TensorMeta&) const = default;
};

TensorMeta meta_of(const at::Tensor& t);

/// In plain memory on the CPU: what passes know how to lay out, and what a program gives to kernels straight away.
bool is_dense_cpu(const TensorMeta& meta);

enum class ValueKind : uint8_t {
  input,       // given by the caller, another tensor at each call
  persistent,  // lives longer than a call: parameters, optimizer state, gradient buckets
  constant,    // made by the recorded function itself, the same at every call
  computed,    // result of a node
  buffer,      // memory that the graph owns and nodes write into, at `offset` of its arena
  work,        // a collective on its way; no tensor
};

struct Value {
  ValueKind kind = ValueKind::computed;
  TensorMeta meta = {};
  at::Tensor tensor = {};    // of persistent values and constants
  int32_t storage = -1;      // values with the same number share memory
  int64_t arena_offset = 0;  // bytes, of a buffer
  std::string name = {};     // for readers; may be empty
};

/// A generator of the user's.
using WeakGenerator = c10::weak_intrusive_ptr<c10::GeneratorImpl>;

/// One argument of a node: a constant, or values.
struct Argument {
  enum class Kind : uint8_t { constant, value, values, optional_values, nested_values, group, generator };
  Kind kind = Kind::constant;
  // Of a group: its registered name; of nested values: the length of each list; of a generator of the user's: its
  // number in the recording, which holds it weakly.
  c10::IValue constant = {};
  std::vector<ValueId> ids = {};

  static Argument of(c10::IValue constant) { return {Kind::constant, std::move(constant), {}}; }
  static Argument of_value(ValueId id) { return {Kind::value, {}, {id}}; }
  static Argument of_values(std::vector<ValueId> ids) { return {Kind::values, {}, std::move(ids)}; }
};

/// The part of a training step that a node belongs to.
enum class Phase : uint8_t {
  other,  // none of them, or not known
  forward,
  backward,
  collective,  // communication, whatever part it is for: how a report counts it, never that of a node
  optimizer,
};

/// "backward"
std::string_view phase_name(Phase phase);

struct Node {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  /// Per return of the op. What was written in place keeps its id.
  std::vector<std::vector<ValueId>> results;
  /// As the recording found it; passes keep it.
  Phase phase = Phase::other;

  /// "all_reduce" for serried::all_reduce_, c10d::allreduce_, _c10d_functional::all_reduce; the op's name without
  /// namespace otherwise.
  std::string short_name() const;
  bool is_collective() const;
  /// Whether it sleeps until a collective that was started is done.
  bool is_wait() const;
  /// Of a collective, else empty.
  std::string group_name() const;
};

/// That of all `nodes`; other where they differ.
Phase common_phase(c10::ArrayRef<Node> nodes);

/// A node of the op `name`; arguments left out at the end have their defaults.
Node make_node(const char* name, std::vector<Argument> arguments, std::vector<std::vector<ValueId>> results,
               const char* overload = "");

/// What a parameter's .grad is after a call.
struct Gradient {
  std::string parameter;  // for readers
  ValueId value = kNoValue;
};

class Graph {
 public:
  ValueId add_value(Value value);
  Node& add_node(Node node);

  std::vector<Node>& nodes() { return nodes_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  std::vector<Value>& values() { return values_; }
  const std::vector<Value>& values() const { return values_; }
  Value& value(ValueId id) { return values_.at(id); }
  const Value& value(ValueId id) const { return values_.at(id); }

  /// In the order of the captured function's arguments and results; an undefined tensor is kNoValue.
  std::vector<ValueId>& inputs() { return inputs_; }
  const std::vector<ValueId>& inputs() const { return inputs_; }
  std::vector<ValueId>& outputs() { return outputs_; }
  const std::vector<ValueId>& outputs() const { return outputs_; }
  /// Of the DTensors among them. Gradients that a replay takes as hidden inputs have none.
  ///     graph.output_layouts().at(0).placements
  DTensorLayouts& input_layouts() { return input_layouts_; }
  const DTensorLayouts& input_layouts() const { return input_layouts_; }
  DTensorLayouts& output_layouts() { return output_layouts_; }
  const DTensorLayouts& output_layouts() const { return output_layouts_; }
  std::vector<Gradient>& gradients() { return gradients_; }
  const std::vector<Gradient>& gradients() const { return gradients_; }

  /// Bytes of the memory that buffers lie in.
  int64_t arena_bytes() const { return arena_bytes_; }
  void set_arena_bytes(int64_t bytes) { arena_bytes_ = bytes; }

  /// Indices of the nodes that read or write `id`.
  std::vector<size_t> uses(ValueId id) const;
  /// Values that outlive a run: outputs, gradients, everything persistent.
  std::vector<bool> escaping() const;

  /// How many nodes are called `name`: "all_reduce", "mm", or in full "aten::mm".
  int64_t count(std::string_view name) const;
  std::vector<size_t> collectives() const;

  /// One line per node, like code.
  std::string to_string() const;

 private:
  std::vector<Node> nodes_;
  std::vector<Value> values_;
  std::vector<ValueId> inputs_;
  std::vector<ValueId> outputs_;
  DTensorLayouts input_layouts_;
  DTensorLayouts output_layouts_;
  std::vector<Gradient> gradients_;
  int64_t arena_bytes_ = 0;
};

/// Calls `fn(ValueId)` for every defined value among the arguments of `node`.
template <class Fn>
void for_each_operand(const Node& node, Fn fn) {
  for (const Argument& argument : node.arguments) {
    for (ValueId id : argument.ids) {
      if (id != kNoValue) fn(id);
    }
  }
}

template <class Fn>
void for_each_result(const Node& node, Fn fn) {
  for (const auto& ids : node.results) {
    for (ValueId id : ids) {
      if (id != kNoValue) fn(id);
    }
  }
}

/// Whether argument `i` of the op is written by it.
bool is_written(const c10::FunctionSchema& schema, size_t i);
/// Calls `fn(ValueId)` for every defined value that `node` writes.
template <class Fn>
void for_each_written(const Node& node, Fn fn) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!is_written(node.op.schema(), i)) continue;
    for (ValueId id : node.arguments[i].ids) {
      if (id != kNoValue) fn(id);
    }
  }
}

/// Whether the op writes none of its arguments and its results share no memory with them.
bool is_functional(const c10::FunctionSchema& schema);
/// Whether the result is a view of the first argument.
bool is_view(const c10::FunctionSchema& schema);
/// Whether the op draws random numbers: running it once more or once less changes what follows.
bool is_random(const c10::OperatorHandle& op);
/// Whether the op leaves the memory of its result as it finds it: empty and its kin.
bool makes_unwritten(const c10::OperatorHandle& op);
/// Whether the op fills one new tensor by its constants, the same way each time: zeros, full, arange, ones_like.
bool makes_by_constants(const c10::OperatorHandle& op);

}  // namespace serried::graph
