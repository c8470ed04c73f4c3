// The words of `serried explain` as a call.
#include "tools/serried/explain_call.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dispatch/op_by_name.h"

namespace serried::tools {
namespace {

constexpr const char* kWhere = "explain";
constexpr int64_t kDefaultSize = 64;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, separator);) words.push_back(word);
  return words;
}

int64_t integer(const std::string& text, const char* what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return value;
  raise<c10::ValueError>({kWhere, c10::str("\"", text, "\" is not a number of ", what), "pass a whole number"});
}

int64_t axis_size(const std::string& text) {
  const int64_t size = integer(text, "ranks");
  if (size >= 1) return size;
  raise<c10::ValueError>({kWhere, c10::str("an axis of the mesh has ", size, " ranks"), "pass 1 or more"});
}

double real(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == 0) return value;
  raise<c10::ValueError>({kWhere, "\"" + text + "\" is not a number", "pass a number such as 0.5"});
}

bool truth(const std::string& text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  raise<c10::ValueError>({kWhere, "\"" + text + "\" is neither true nor false", "pass true or false"});
}

c10::IValue typed_list(c10::TypeKind element, const std::string& text) {
  const bool bracketed = text.size() >= 2 && text.front() == '[' && text.back() == ']';
  const std::vector<std::string> words = split(bracketed ? text.substr(1, text.size() - 2) : text, ',');
  c10::List<int64_t> integers;
  c10::List<double> reals;
  c10::List<bool> truths;
  for (const std::string& word : words) {
    if (element == c10::TypeKind::BoolType) {
      truths.push_back(truth(word));
    } else if (element == c10::TypeKind::FloatType) {
      reals.push_back(real(word));
    } else {
      integers.push_back(integer(word, "an argument"));
    }
  }
  if (element == c10::TypeKind::BoolType) return truths;
  return element == c10::TypeKind::FloatType ? c10::IValue(reals) : c10::IValue(integers);
}

c10::IValue typed(const c10::TypePtr& type, const std::string& text) {
  using c10::TypeKind;
  switch (type->kind()) {
    case TypeKind::OptionalType:
      if (text == "none") return {};
      return typed(type->expectRef<c10::OptionalType>().getElementType(), text);
    case TypeKind::IntType:
    case TypeKind::SymIntType: return integer(text, "an argument");
    case TypeKind::FloatType: return real(text);
    case TypeKind::NumberType:
      return text.find_first_of(".e") == text.npos ? c10::IValue(integer(text, "an argument")) : real(text);
    case TypeKind::BoolType: return truth(text);
    case TypeKind::ListType: return typed_list(type->expectRef<c10::ListType>().getElementType()->kind(), text);
    default: return text;
  }
}

std::map<std::string, c10::IValue> parse_arguments(const c10::FunctionSchema& schema,
                                                   const std::vector<std::string>& words) {
  std::map<std::string, c10::IValue> values;
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    if (equals == word.npos) {
      raise<c10::ValueError>({kWhere, "--args \"" + word + "\" has no value", "pass name=value, as in --args dim=1"});
    }
    const std::string name = word.substr(0, equals);
    values[name] = parse_argument(schema, name, word.substr(equals + 1));
  }
  return values;
}

// Two dims, or as many as the placements speak of.
Sizes default_shape(const Placements& placements) {
  int64_t ndim = 2;
  for (const Placement& placement : placements) ndim = std::max(ndim, placement.dim() + 1);
  return Sizes(size_t(ndim), kDefaultSize);
}

std::vector<Sizes> shapes_for(const ExplainWords& words, const std::vector<Placements>& placements) {
  if (words.shapes.empty()) {
    std::vector<Sizes> shapes;
    for (const Placements& each : placements) shapes.push_back(default_shape(each));
    return shapes;
  }
  std::vector<Sizes> shapes = parse_shapes(words.shapes);
  if (shapes.size() == placements.size()) return shapes;
  raise<c10::ValueError>({kWhere, c10::str(shapes.size(), " shapes for ", placements.size(), " tensors"),
                          "pass one shape per tensor, as in --shapes 8x16,16x4"});
}

// Tensors of the call without data, in the order of the schema.
std::vector<spmd::TensorArg> describe(const torch::jit::Stack& stack) {
  std::vector<spmd::TensorArg> tensors;
  const auto add = [&](const c10::IValue& value, int argument, int index) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const at::Tensor& t = value.toTensor();
    tensors.push_back({argument, index, c10::DimVector(t.sizes()), c10::DimVector(t.strides()), t.scalar_type()});
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    add(stack[i], int(i), -1);
    if (!stack[i].isTensorList()) continue;
    int index = 0;
    for (const c10::IValue& item : stack[i].toListRef()) add(item, int(i), index++);
  }
  return tensors;
}

}  // namespace

MeshAxes parse_mesh(const std::string& text) {
  MeshAxes mesh;
  const bool named = text.find('=') != text.npos;
  for (const std::string& word : split(text, named ? ',' : 'x')) {
    const size_t equals = word.find('=');
    if (named && equals == word.npos) {
      raise<c10::ValueError>({kWhere, "axis \"" + word + "\" of the mesh has no name, others have",
                              "name all axes, as in dp=2,tp=2, or none, as in 2x2"});
    }
    if (named) mesh.names.push_back(word.substr(0, equals));
    mesh.shape.push_back(axis_size(named ? word.substr(equals + 1) : word));
  }
  return mesh;
}

std::vector<Sizes> parse_shapes(const std::string& text) {
  std::vector<Sizes> shapes;
  for (const std::string& word : split(text, ',')) {
    shapes.emplace_back();
    for (const std::string& size : split(word, 'x')) shapes.back().push_back(integer(size, "a shape"));
  }
  return shapes;
}

c10::ScalarType parse_dtype(const std::string& text) {
  for (int i = 0; i < int(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = c10::ScalarType(i);
    if (dtype == c10::ScalarType::Undefined || c10::isQIntType(dtype)) continue;
    if (watch::dtype_name(dtype) == text) return dtype;
  }
  raise<c10::ValueError>({kWhere, "there is no dtype \"" + text + "\"", "pass one such as f32, bf16, f64, i64, bool"});
}

c10::IValue parse_argument(const c10::FunctionSchema& schema, const std::string& name, const std::string& text) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == name) return typed(argument.type(), text);
  }
  raise<c10::ValueError>({kWhere, c10::str("there is no argument \"", name, "\" in ", schema), "pass one of those"});
}

std::string explain_words(const ExplainWords& words) {
  const MeshAxes mesh = parse_mesh(words.mesh);
  std::vector<Placements> placements;
  for (const std::string& text : words.placements) placements.push_back(parse_placements(text));
  const std::vector<Sizes> shapes = shapes_for(words, placements);
  const std::vector<std::string> dtypes = split(words.dtype, ',');
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    placements[i] = checked_placements(kWhere, placements[i], int64_t(shapes[i].size()), int64_t(mesh.shape.size()));
    tensors.push_back(at::empty(
        shapes[i], at::TensorOptions().device(at::kMeta).dtype(parse_dtype(dtypes[std::min(i, dtypes.size() - 1)]))));
  }
  const c10::OperatorHandle op = detail::find_op_for(words.op, tensors.size());
  const torch::jit::Stack stack =
      detail::fill_arguments(op.schema(), tensors, parse_arguments(op.schema(), words.arguments));
  const spmd::Call call(op.schema(), stack, describe(stack));
  if (call.tensors().size() != placements.size()) {
    raise<c10::ValueError>(
        {kWhere,
         c10::str(op.schema(), " takes ", call.tensors().size(), " of the ", placements.size(), " tensors given"),
         "pass one placement text per tensor of the schema"});
  }
  return explain(call, placements, mesh);
}

}  // namespace serried::tools
