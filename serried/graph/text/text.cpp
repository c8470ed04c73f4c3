// Prints a graph like code.
#include "serried/graph/text/text.h"

#include <ATen/core/jit_type.h>

#include "serried/base/text.h"
#include "serried/comm/collectives/watch.h"
#include "serried/graph/text/literal.h"

namespace serried::graph {
namespace {

using c10::IValue;
using serried::detail::bytes_text;

constexpr int64_t kShownElements = 4;  // of a constant
constexpr size_t kShownName = 48;      // letters of a group's

const char* letter_of(ValueKind kind) {
  switch (kind) {
    case ValueKind::input: return "in";
    case ValueKind::persistent: return "p";
    case ValueKind::constant: return "c";
    case ValueKind::buffer: return "b";
    case ValueKind::work: return "w";
    case ValueKind::computed: return "";
  }
  return "";
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

bool is_output_argument(const c10::Argument& declared) {
  return declared.is_out() || declared.name().starts_with("output");
}

// One node as a line, in one of the styles.
class LineWriter {
 public:
  LineWriter(const Graph& graph, const Node& node, LineStyle style)
      : graph_(graph), node_(node), is_complete_(style == LineStyle::complete) {}

  std::string line() const {
    const std::string call = results() + op_name() + "(" + joined(arguments()) + ")";
    return is_complete_ ? call : call + remark();
  }

 private:
  std::string value(ValueId id) const {
    if (!is_complete_ || id == kNoValue) return value_text(graph_, id);
    return "%" + std::to_string(id);
  }

  std::string list(std::vector<ValueId>::const_iterator begin, std::vector<ValueId>::const_iterator end) const {
    std::vector<std::string> words;
    for (; begin != end; ++begin) words.push_back(value(*begin));
    return "[" + joined(words) + "]";
  }

  std::string nested(const Argument& argument) const {
    std::vector<std::string> lists;
    auto begin = argument.ids.begin();
    for (const IValue& length : argument.constant.toListRef()) {
      lists.push_back(list(begin, begin + length.toInt()));
      begin += length.toInt();
    }
    return "[" + joined(lists) + "]";
  }

  // Names of split groups list their ranks, which may be thousands.
  std::string group_name(const std::string& name) const {
    if (is_complete_ || name.size() <= kShownName) return name;
    return name.substr(0, kShownName / 2) + "..." + name.substr(name.size() - kShownName / 2);
  }

  std::string argument_text(size_t k) const {
    const Argument& argument = node_.arguments[k];
    switch (argument.kind) {
      case Argument::Kind::value: return value(argument.ids[0]);
      case Argument::Kind::values:
      case Argument::Kind::optional_values: return list(argument.ids.begin(), argument.ids.end());
      case Argument::Kind::nested_values: return nested(argument);
      case Argument::Kind::group: return quoted_text(group_name(argument.constant.toStringRef()));
      case Argument::Kind::generator: return "generator";
      case Argument::Kind::constant: return literal_text(argument.constant, literal_type(declared(k)));
    }
    return "";
  }

  const c10::Argument& declared(size_t k) const { return node_.op.schema().arguments()[k]; }

  bool is_default(size_t k) const {
    const auto& value = declared(k).default_value();
    if (!value.has_value() || node_.arguments[k].kind != Argument::Kind::constant) return false;
    return literal_text(*value, literal_type(declared(k))) == argument_text(k);
  }

  // By place as long as they are values that are read, by name from the first other on.
  std::vector<std::string> arguments() const {
    std::vector<std::string> words;
    bool by_name = false;
    for (size_t k = 0; k < node_.arguments.size(); ++k) {
      const Argument::Kind kind = node_.arguments[k].kind;
      by_name |= kind == Argument::Kind::constant || kind == Argument::Kind::group ||
                 kind == Argument::Kind::generator || is_output_argument(declared(k));
      if (!is_complete_ && is_default(k)) continue;
      const std::string name = kind == Argument::Kind::group && !is_complete_ ? "group" : declared(k).name();
      words.push_back((by_name ? name + "=" : "") + argument_text(k));
    }
    return words;
  }

  bool is_operand(ValueId id) const {
    bool found = false;
    for_each_operand(node_, [&](ValueId operand) { found |= operand == id; });
    return found;
  }

  // What was written in place is seen among the arguments.
  std::vector<ValueId> new_results() const {
    std::vector<ValueId> ids;
    for_each_result(node_, [&](ValueId id) {
      if (!is_operand(id)) ids.push_back(id);
    });
    return ids;
  }

  std::string results() const {
    std::vector<std::string> words;
    if (is_complete_) {
      for (size_t r = 0; r < node_.results.size(); ++r) words.push_back(complete_result(r));
    } else {
      for (ValueId id : new_results()) words.push_back(value(id));
    }
    return words.empty() ? "" : joined(words) + " = ";
  }

  std::string complete_result(size_t r) const {
    const std::vector<ValueId>& ids = node_.results[r];
    if (node_.op.schema().returns()[r].type()->kind() == c10::TypeKind::ListType) return list(ids.begin(), ids.end());
    return ids.empty() ? "_" : value(ids[0]);
  }

  std::string op_name() const {
    const std::string& name = node_.op.operator_name().name;
    if (is_complete_) return c10::toString(node_.op.operator_name());
    if (!node_.is_collective()) return name.starts_with("aten::") ? name.substr(6) : name;
    const std::string start = name.find("::start_") != std::string::npos ? "start_" : "";
    return start + node_.short_name() + (name.ends_with('_') ? "_" : "");
  }

  std::string remark() const {
    std::vector<std::string> words;
    for (ValueId id : new_results()) {
      if (graph_.value(id).kind != ValueKind::work) words.push_back(graph_.value(id).meta.to_string());
    }
    const int64_t bytes = node_.is_collective() ? collective_bytes(graph_, node_) : 0;
    if (bytes > 0) words.push_back(bytes_text(bytes));
    return words.empty() ? "" : "  # " + joined(words);
  }

  const Graph& graph_;
  const Node& node_;
  const bool is_complete_;
};

// As a DTensor behind its part; empty for plain tensors.
std::string whole_of(const DTensorLayouts& layouts, size_t number) {
  const DTensorLayout* layout = find_layout(layouts, number);
  return layout == nullptr ? "" : " = " + layout->to_string();
}

std::string elements_of(const at::Tensor& t) {
  std::vector<std::string> words;
  const at::Tensor flat = t.reshape({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) words.push_back(literal_text(IValue(flat[i].item())));
  return t.dim() == 0 ? words[0] : "[" + joined(words) + "]";
}

// What is there before the first line runs.
std::string declaration(const Graph& graph, ValueId id) {
  const Value& value = graph.value(id);
  const std::string text = value_text(graph, id) + ": " + value.meta.to_string();
  switch (value.kind) {
    case ValueKind::persistent: return "  persistent " + text + "\n";
    case ValueKind::buffer: return "  buffer " + text + " at byte " + std::to_string(value.arena_offset) + "\n";
    case ValueKind::constant: break;
    default: return "";
  }
  const bool is_shown = value.tensor.defined() && value.tensor.layout() == at::kStrided &&
                        value.tensor.device().is_cpu() && value.tensor.numel() <= kShownElements;
  return "  constant " + text + (is_shown ? " = " + elements_of(value.tensor) : "") + "\n";
}

}  // namespace

std::string constant_text(const IValue& constant) {
  return literal_text(constant);
}

std::string value_text(const Graph& graph, ValueId id) {
  if (id == kNoValue) return "undefined";
  const Value& value = graph.value(id);
  if (!value.name.empty()) return "%" + value.name;
  return "%" + std::string(letter_of(value.kind)) + std::to_string(id);
}

int64_t collective_bytes(const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  for (size_t k = 0; k < node.arguments.size(); ++k) {
    if (is_output_argument(node.op.schema().arguments()[k])) continue;
    for (ValueId id : node.arguments[k].ids) {
      if (id != kNoValue) bytes += graph.value(id).meta.num_bytes();
    }
  }
  return bytes;
}

std::string line_of(const Graph& graph, size_t i, LineStyle style) {
  return LineWriter(graph, graph.nodes().at(i), style).line();
}

std::string Graph::to_string() const {
  std::vector<std::string> inputs, outputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const ValueId id = inputs_[i];
    const std::string part = id == kNoValue ? "" : ": " + value(id).meta.to_string();
    inputs.push_back(value_text(*this, id) + part + whole_of(input_layouts_, i));
  }
  std::string text = "graph(" + joined(inputs) + "):\n";
  if (arena_bytes_ > 0) text += "  arena of " + bytes_text(arena_bytes_) + "\n";
  for (ValueKind kind : {ValueKind::persistent, ValueKind::constant, ValueKind::buffer}) {
    for (size_t id = 0; id < values_.size(); ++id) {
      if (values_[id].kind == kind) text += declaration(*this, ValueId(id));
    }
  }
  for (size_t i = 0; i < nodes_.size(); ++i) text += "  " + line_of(*this, i) + "\n";
  for (const Gradient& gradient : gradients_) {
    text += "  gradient of " + gradient.parameter + " = " + value_text(*this, gradient.value) + "\n";
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    outputs.push_back(value_text(*this, outputs_[i]) + whole_of(output_layouts_, i));
  }
  return text + "  return " + joined(outputs) + "\n";
}

}  // namespace serried::graph
