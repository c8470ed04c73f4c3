// Building and asking a graph.
#include "serried/graph/graph.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>

#include "serried/comm/collectives/watch.h"

namespace serried::graph {
namespace {

// c10d's spelling beside ours.
constexpr std::pair<std::string_view, std::string_view> kCollectives[] = {
    {"all_gather_into_tensor", "all_gather"},
    {"all_to_all_single", "all_to_all"},
    {"reduce_scatter_tensor", "reduce_scatter"},
    {"all_gather", "all_gather"},
    {"gather_rows", "all_gather"},
    {"all_reduce", "all_reduce"},
    {"all_to_all", "all_to_all"},
    {"reduce_scatter", "reduce_scatter"},
    {"broadcast", "broadcast"},
    {"barrier", "barrier"},
    {"recv", "recv"},
    {"reduce", "reduce"},
    {"send", "send"},
    {"allreduce", "all_reduce"},
    {"_allgather_base", "all_gather"},
    {"allgather", "all_gather"},
    {"_reduce_scatter_base", "reduce_scatter"},
    {"alltoall_base", "all_to_all"},
    {"alltoall", "all_to_all"},
    {"gather", "gather"},
    {"scatter", "scatter"},
    {"recv_any_source", "recv"},
};

bool has_collectives(std::string_view space) {
  return space == "serried" || space == "c10d" || space == "_c10d_functional" || space == "_c10d_functional_autograd";
}

void strip_prefix(std::string_view& name, std::string_view prefix) {
  if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
}

void strip_suffix(std::string_view& name, std::string_view suffix) {
  if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
}

// Our name of the collective, or empty.
std::string_view collective_name(std::string_view qualified) {
  const size_t colons = qualified.find("::");
  if (!has_collectives(qualified.substr(0, colons))) return {};
  std::string_view name = qualified.substr(colons + 2);
  strip_prefix(name, "start_");
  for (std::string_view suffix : {"_", "_coalesced", "_into", "_out"}) strip_suffix(name, suffix);
  for (const auto& [theirs, ours] : kCollectives) {
    if (name == theirs) return ours;
  }
  return {};
}

std::string_view unqualified(std::string_view name) {
  const size_t colons = name.find("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

// The schemas of c10d do not say what they write.
bool is_written_by_c10d(const c10::FunctionSchema& schema, size_t i) {
  if (!schema.name().starts_with("c10d::")) return false;
  const std::string& name = schema.arguments()[i].name();
  return name.starts_with("output") || (name == "tensors" && schema.name() != "c10d::send");
}

// "zeros" for aten::zeros, aten::zeros_like, aten::new_zeros; empty outside of aten.
std::string_view kind_of_factory(std::string_view name) {
  if (!name.starts_with("aten::")) return {};
  name.remove_prefix(6);
  strip_prefix(name, "new_");
  strip_suffix(name, "_like");
  return name;
}

}  // namespace

int64_t TensorMeta::num_bytes() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count * int64_t(c10::elementSize(dtype));
}

int64_t TensorMeta::storage_end() const {
  if (num_bytes() == 0 || strides.size() != sizes.size()) return num_bytes();
  int64_t last = offset;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * int64_t(c10::elementSize(dtype));
}

std::string TensorMeta::to_string() const {
  std::string text = watch::dtype_name(dtype);
  text += '[';
  for (size_t d = 0; d < sizes.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  return text + ']';
}

TensorMeta meta_of(const at::Tensor& t) {
  TensorMeta meta{.sizes = c10::DimVector(t.sizes()), .strides = {}, .dtype = t.scalar_type(), .device = t.device()};
  if (t.layout() == at::kStrided) meta.strides = c10::DimVector(t.strides());
  if (t.has_storage()) meta.offset = t.storage_offset();
  return meta;
}

bool is_dense_cpu(const TensorMeta& meta) {
  return meta.device.is_cpu() && meta.strides.size() == meta.sizes.size() && !c10::isComplexType(meta.dtype);
}

std::string Node::short_name() const {
  const std::string_view collective = collective_name(op.operator_name().name);
  return std::string(collective.empty() ? unqualified(op.operator_name().name) : collective);
}

bool Node::is_collective() const {
  return !collective_name(op.operator_name().name).empty();
}

bool Node::is_wait() const {
  const std::string& name = op.operator_name().name;
  return name == "serried::wait" || name == "_c10d_functional::wait_tensor";
}

std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::forward: return "forward";
    case Phase::backward: return "backward";
    case Phase::collective: return "collective";
    case Phase::optimizer: return "optimizer";
    case Phase::other: break;
  }
  return "other";
}

Phase common_phase(c10::ArrayRef<Node> nodes) {
  const auto differs = [&](const Node& node) { return node.phase != nodes[0].phase; };
  return nodes.empty() || std::any_of(nodes.begin(), nodes.end(), differs) ? Phase::other : nodes[0].phase;
}

std::string Node::group_name() const {
  for (const Argument& argument : arguments) {
    if (argument.kind == Argument::Kind::group) return argument.constant.toStringRef();
  }
  if (!is_collective()) return "";
  // The functional ops of c10d take the name itself.
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.schema().arguments()[i].name() == "group_name") return arguments[i].constant.toStringRef();
  }
  return "";
}

ValueId Graph::add_value(Value value) {
  values_.push_back(std::move(value));
  return ValueId(values_.size() - 1);
}

Node make_node(const char* name, std::vector<Argument> arguments, std::vector<std::vector<ValueId>> results,
               const char* overload) {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const std::vector<c10::Argument>& declared = op.schema().arguments();
  while (arguments.size() < declared.size()) {
    arguments.push_back(Argument::of(declared[arguments.size()].default_value().value()));
  }
  return {op, std::move(arguments), std::move(results)};
}

Node& Graph::add_node(Node node) {
  nodes_.push_back(std::move(node));
  return nodes_.back();
}

std::vector<size_t> Graph::uses(ValueId id) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    bool used = false;
    for_each_operand(nodes_[i], [&](ValueId operand) { used |= operand == id; });
    if (used) found.push_back(i);
  }
  return found;
}

std::vector<bool> Graph::escaping() const {
  std::vector<bool> escapes(values_.size());
  for (size_t id = 0; id < values_.size(); ++id) {
    escapes[id] = values_[id].kind == ValueKind::persistent || values_[id].kind == ValueKind::input;
  }
  for (ValueId id : outputs_) {
    if (id != kNoValue) escapes[id] = true;
  }
  for (const Gradient& gradient : gradients_) {
    if (gradient.value != kNoValue) escapes[gradient.value] = true;
  }
  return escapes;
}

int64_t Graph::count(std::string_view name) const {
  return std::count_if(nodes_.begin(), nodes_.end(), [&](const Node& node) {
    return node.op.operator_name().name == name || node.short_name() == name;
  });
}

std::vector<size_t> Graph::collectives() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].is_collective()) found.push_back(i);
  }
  return found;
}

bool is_written(const c10::FunctionSchema& schema, size_t i) {
  const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
  return (alias != nullptr && alias->isWrite()) || is_written_by_c10d(schema, i);
}

bool is_functional(const c10::FunctionSchema& schema) {
  const auto is_free = [](const c10::Argument& argument) { return argument.alias_info() == nullptr; };
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (is_written(schema, i)) return false;
  }
  return std::all_of(schema.arguments().begin(), schema.arguments().end(), is_free) &&
         std::all_of(schema.returns().begin(), schema.returns().end(), is_free);
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.arguments().empty() || schema.returns().empty()) return false;
  const c10::AliasInfo* in = schema.arguments()[0].alias_info();
  const c10::AliasInfo* out = schema.returns()[0].alias_info();
  return in != nullptr && out != nullptr && !in->isWrite() && !out->isWrite();
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

bool makes_unwritten(const c10::OperatorHandle& op) {
  return kind_of_factory(op.operator_name().name).starts_with("empty");
}

bool makes_by_constants(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 9> kKinds = {"arange", "eye",           "full",  "linspace", "logspace",
                                                             "ones",   "scalar_tensor", "zeros", "range"};
  const std::string_view kind = kind_of_factory(op.operator_name().name);
  return std::find(kKinds.begin(), kKinds.end(), kind) != kKinds.end() && is_functional(op.schema());
}

}  // namespace serried::graph
