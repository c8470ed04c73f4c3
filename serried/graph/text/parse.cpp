// Reads a graph line by line; the schema of an op says what its arguments are.
#include "serried/graph/text/serialize.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "serried/graph/text/custom_class.h"
#include "serried/graph/text/layout_text.h"
#include "serried/graph/text/literal.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

using c10::TypeKind;
using c10::TypePtr;

constexpr std::string_view kKinds[] = {"input", "persistent", "constant", "computed", "buffer", "work"};

bool is_list_of(const TypePtr& type, TypeKind kind) {
  const auto* list = type->castRaw<c10::ListType>();
  return list != nullptr && list->getElementType()->kind() == kind;
}

// Whether an argument that is declared as `type` can be `constant`: compared by what LibTorch takes for it.
bool can_be(const TypePtr& type, const c10::IValue& constant) {
  switch (type->kind()) {
    case TypeKind::OptionalType:
      return constant.isNone() || can_be(type->castRaw<c10::OptionalType>()->getElementType(), constant);
    case TypeKind::ListType: {
      if (!constant.isList()) return false;
      const TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const auto elements = constant.toListRef();
      return std::all_of(elements.begin(), elements.end(), [&](const c10::IValue& e) { return can_be(element, e); });
    }
    case TypeKind::NumberType: return constant.isScalar();
    case TypeKind::IntType:
    case TypeKind::ScalarTypeType:
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType: return constant.isInt();
    case TypeKind::FloatType: return constant.isDouble();
    case TypeKind::BoolType: return constant.isBool();
    case TypeKind::ComplexType: return constant.isComplexDouble();
    case TypeKind::StringType: return constant.isString();
    case TypeKind::DeviceObjType: return constant.isDevice();
    case TypeKind::GeneratorType: return constant.isGenerator();
    case TypeKind::ClassType: return constant.isCustomClass() && *constant.type() == *type;
    default: return false;
  }
}

void check_version(Cursor& in) {
  if (in.rest() == kFormat) return;
  const bool is_ours = in.rest().starts_with("serried graph ");
  in.fail(c10::str("\"", in.rest(), "\" is not \"", kFormat, "\""),
          is_ours ? "capture the function again, and save its graph with this version" : Cursor::kUnchanged);
}

class GraphReader {
 public:
  void read(Cursor& in) {
    if (in.accept("value ")) return read_value(in);
    if (in.accept("node ")) return read_node(in);
    if (in.accept("inputs ")) return read_ids(in, graph_.inputs());
    if (in.accept("outputs ")) return read_ids(in, graph_.outputs());
    if (in.accept("input ")) return read_placed(in, "input", graph_.inputs().size(), graph_.input_layouts());
    if (in.accept("output ")) return read_placed(in, "output", graph_.outputs().size(), graph_.output_layouts());
    if (in.accept("gradient ")) return read_gradient(in);
    if (in.accept("arena ")) return read_arena(in);
    in.fail(c10::str("there is no such line: \"", in.rest(), "\""));
  }

  Graph take() { return std::move(graph_); }

 private:
  void read_value(Cursor& in) {
    const size_t number = graph_.values().size();
    in.expect(c10::str("%", number));
    Value value{.kind = read_kind(in)};
    if (value.kind != ValueKind::work) read_meta(in, value.meta);
    if (in.accept("storage ")) value.storage = read_storage(in);
    if (in.accept("at ")) value.arena_offset = read_bytes(in);
    if (in.accept("name ")) value.name = read_quoted(in);
    if (value.kind == ValueKind::buffer) check_buffer(in, value);
    graph_.add_value(std::move(value));
  }

  static int32_t read_storage(Cursor& in) {
    const int64_t number = read_int(in);
    if (number < 0 || number > std::numeric_limits<int32_t>::max()) in.fail(c10::str("there is no storage ", number));
    return int32_t(number);
  }

  static int64_t read_bytes(Cursor& in) {
    const int64_t bytes = read_int(in);
    if (bytes < 0) in.fail(c10::str(bytes, " bytes are below 0"));
    return bytes;
  }

  void read_arena(Cursor& in) {
    if (!graph_.values().empty()) in.fail("the arena stands in front of all values");
    graph_.set_arena_bytes(read_bytes(in));
  }

  // Nodes write into it.
  void check_buffer(Cursor& in, const Value& value) const {
    const int64_t end = value.meta.storage_end(), room = graph_.arena_bytes() - value.arena_offset;
    if (room >= 0 && end <= room) return;
    in.fail(c10::str("a buffer of ", end, " bytes at ", value.arena_offset, " is outside of the arena of ",
                     graph_.arena_bytes(), " bytes"));
  }

  static ValueKind read_kind(Cursor& in) {
    const std::string_view word = in.word();
    const auto* found = std::find(std::begin(kKinds), std::end(kKinds), word);
    if (found == std::end(kKinds)) in.fail(c10::str("unknown kind of value \"", word, "\""));
    return ValueKind(found - std::begin(kKinds));
  }

  static void read_meta(Cursor& in, TensorMeta& meta) {
    meta.dtype = read_dtype(in);
    meta.sizes = read_numbers(in);
    if (!is_possible_shape(meta.sizes)) in.fail("no tensor has the shape " + numbers_text(meta.sizes));
    meta.strides = in.accept("strides ") ? read_numbers(in) : serried::contiguous_strides(meta.sizes);
    if (in.accept("offset ")) meta.offset = read_int(in);
    if (in.accept("device ")) meta.device = read_device(in);
    if (is_possible(meta)) return;
    in.fail(c10::str("no tensor ", meta.to_string(), " has strides ", numbers_text(meta.strides), " and offset ",
                     meta.offset));
  }

  ValueId read_id(Cursor& in) {
    if (in.accept("undefined")) return kNoValue;
    in.expect("%");
    const int64_t id = read_int(in);
    if (id < 0 || id >= int64_t(graph_.values().size())) in.fail(c10::str("there is no value %", id));
    return ValueId(id);
  }

  void read_ids(Cursor& in, std::vector<ValueId>& ids) {
    in.expect("[");
    read_list(in, "]", [&] { ids.push_back(read_id(in)); });
  }

  static void read_placed(Cursor& in, const char* what, size_t count, DTensorLayouts& layouts) {
    const int64_t number = read_int(in);
    if (number < 0 || number >= int64_t(count)) in.fail(c10::str("there is no ", what, " ", number));
    in.expect("placed");
    const bool is_new = layouts.emplace(size_t(number), read_layout(in)).second;
    if (!is_new) in.fail(c10::str(what, " ", number, " is placed twice"));
  }

  void read_gradient(Cursor& in) {
    const ValueId id = read_id(in);
    in.expect("of ");
    graph_.gradients().push_back({read_quoted(in), id});
  }

  void read_node(Cursor& in) {
    std::vector<std::vector<ValueId>> results;
    const bool has_results = in.rest().find(" = ") < in.rest().find('(');
    if (has_results) read_results(in, results);
    const c10::OperatorHandle op = read_op(in);
    const size_t num_returns = op.schema().returns().size();
    if (results.size() != num_returns) {
      in.fail(c10::str(c10::toString(op.operator_name()), " has ", num_returns, " results, not ", results.size()));
    }
    Node node{op, {}, std::move(results)};
    in.expect("(");
    for (const c10::Argument& declared : op.schema().arguments()) {
      // Text of an earlier version ends before arguments that ops have got since.
      if (declared.default_value() && in.next_is(")")) {
        node.arguments.push_back(Argument::of(*declared.default_value()));
        continue;
      }
      if (!node.arguments.empty()) in.expect(",");
      in.accept(declared.name() + "=");
      node.arguments.push_back(read_argument(in, declared));
    }
    in.expect(")");
    if (in.accept("phase ")) node.phase = read_phase(in);
    graph_.add_node(std::move(node));
  }

  static Phase read_phase(Cursor& in) {
    const std::string_view word = in.word();
    for (Phase phase : {Phase::forward, Phase::backward, Phase::optimizer}) {
      if (word == phase_name(phase)) return phase;
    }
    in.fail(c10::str("unknown phase \"", word, "\""));
  }

  void read_results(Cursor& in, std::vector<std::vector<ValueId>>& results) {
    read_list(in, "=", [&] {
      std::vector<ValueId>& ids = results.emplace_back();
      if (in.next_is("[")) return read_ids(in, ids);
      if (!in.accept("_")) ids.push_back(read_id(in));
    });
  }

  static c10::OperatorHandle read_op(Cursor& in) {
    const std::string name(in.word("_.:"));
    const size_t dot = name.find('.');
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
    if (!op) in.fail(c10::str("unknown op \"", name, "\""), "load the library that registers it first");
    return *op;
  }

  Argument read_argument(Cursor& in, const c10::Argument& declared) {
    const auto* optional = declared.type()->castRaw<c10::OptionalType>();
    const TypePtr type = optional != nullptr ? optional->getElementType() : declared.type();
    const bool can_be_value = type->kind() == TypeKind::TensorType || is_c10d_type(*type, "Work");
    if (can_be_value && (in.next_is("%") || in.next_is("undefined"))) return Argument::of_value(read_id(in));
    if (is_c10d_type(*type, "ProcessGroup")) return {Argument::Kind::group, read_quoted(in), {}};
    if (!in.next_is("[")) return read_constant(in, declared);
    if (is_list_of(type, TypeKind::TensorType)) return read_values(in, Argument::Kind::values);
    if (is_list_of(type, TypeKind::OptionalType)) {
      const TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const bool is_tensor = element->castRaw<c10::OptionalType>()->getElementType()->kind() == TypeKind::TensorType;
      if (is_tensor) return read_values(in, Argument::Kind::optional_values);
    }
    const bool is_nested = is_list_of(type, TypeKind::ListType) &&
                           is_list_of(type->castRaw<c10::ListType>()->getElementType(), TypeKind::TensorType);
    return is_nested ? read_nested(in) : read_constant(in, declared);
  }

  static Argument read_constant(Cursor& in, const c10::Argument& declared) {
    const std::string_view before = in.rest();
    c10::IValue constant = read_literal(in, literal_type(declared));
    if (can_be(declared.type(), constant)) return Argument::of(std::move(constant));
    in.fail(c10::str("argument \"", declared.name(), "\" is a ", declared.type()->str(), ", not ",
                     before.substr(0, before.size() - in.rest().size())));
  }

  Argument read_values(Cursor& in, Argument::Kind kind) {
    Argument argument{kind, {}, {}};
    read_ids(in, argument.ids);
    return argument;
  }

  Argument read_nested(Cursor& in) {
    Argument argument{Argument::Kind::nested_values, {}, {}};
    c10::List<int64_t> lengths;
    in.expect("[");
    read_list(in, "]", [&] {
      const size_t before = argument.ids.size();
      read_ids(in, argument.ids);
      lengths.push_back(int64_t(argument.ids.size() - before));
    });
    argument.constant = lengths;
    return argument;
  }

  Graph graph_;
};

}  // namespace

std::string_view kind_name(ValueKind kind) {
  return kKinds[size_t(kind)];
}

Graph parse_graph(std::string_view text) {
  GraphReader reader;
  size_t number = 0;
  while (true) {
    ++number;
    const size_t length = text.find('\n');
    Cursor in(text.substr(0, length), number);
    if (number == 1) check_version(in);
    if (length == std::string_view::npos) in.fail(c10::str("the text stops here, without \"", kEnd, "\""));
    if (in.rest() == kEnd) return reader.take();
    if (number > 1) reader.read(in);
    if (!in.at_end() && number > 1) in.fail(c10::str("more than a line should have: \"", in.rest(), "\""));
    text.remove_prefix(length + 1);
  }
}

}  // namespace serried::graph
