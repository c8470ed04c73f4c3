// Finds the overload for some tensors, and fills in defaults.
#include "serried/tensor/dispatch/op_by_name.h"

#include <algorithm>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

constexpr const char* kExplain = "explain";

bool is_tensor(const c10::Argument& argument) {
  const c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType;
}

bool is_tensor_list(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_absent_by_default(const c10::Argument& argument) {
  return argument.default_value().has_value() || argument.type()->kind() == c10::TypeKind::OptionalType;
}

// Whether so many tensors and nothing else make a call.
bool takes(const c10::FunctionSchema& schema, size_t num_tensors) {
  size_t least = 0, most = 0;
  bool has_list = false;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.is_out()) return false;
    has_list |= is_tensor_list(argument);
    most += is_tensor(argument);
    least += is_tensor(argument) && !is_absent_by_default(argument);
    if (!is_tensor(argument) && !is_tensor_list(argument) && !is_absent_by_default(argument)) return false;
  }
  return num_tensors >= least && (has_list || num_tensors <= most);
}

std::vector<c10::OperatorHandle> overloads(const std::string& name) {
  std::vector<c10::OperatorHandle> found;
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.name != name) continue;
    if (auto op = c10::Dispatcher::singleton().findSchema(each)) found.push_back(*op);
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.schema().overload_name() < b.schema().overload_name(); });
  return found;
}

}  // namespace

// Lists share in equal parts what the single tensors behind them leave.
torch::jit::Stack fill_arguments(const c10::FunctionSchema& schema, const std::vector<at::Tensor>& tensors,
                                 const std::map<std::string, c10::IValue>& given) {
  size_t next = 0, needed_later = 0, lists_left = 0;
  for (const c10::Argument& each : schema.arguments()) {
    needed_later += is_tensor(each) && !is_absent_by_default(each);
    lists_left += is_tensor_list(each);
  }
  torch::jit::Stack stack;
  for (const c10::Argument& each : schema.arguments()) {
    if (is_tensor(each)) needed_later -= !is_absent_by_default(each);
    const auto value = given.find(each.name());
    if (value != given.end()) {
      stack.push_back(value->second);
    } else if (is_tensor(each) && next < tensors.size()) {
      stack.emplace_back(tensors[next++]);
    } else if (is_tensor_list(each)) {
      const size_t spare = tensors.size() - std::min(tensors.size(), next + needed_later);
      const size_t end = next + spare / lists_left--;
      stack.emplace_back(std::vector<at::Tensor>(tensors.begin() + next, tensors.begin() + end));
      next = end;
    } else if (is_absent_by_default(each)) {
      stack.push_back(each.default_value().value_or(c10::IValue()));
    } else {
      raise<c10::ValueError>(
          {kExplain, c10::str("argument \"", each.name(), "\" of ", schema, " has no default"),
           c10::str("pass all arguments as a torch::jit::Stack, or --args ", each.name(), "=... on the command line")});
    }
  }
  return stack;
}

c10::OperatorHandle find_op_for(const std::string& op, size_t num_tensors) {
  const size_t dot = op.find('.');
  const std::string name = op.substr(0, dot);
  const std::vector<c10::OperatorHandle> found = overloads(name);
  if (found.empty()) {
    raise<c10::ValueError>({kExplain, "there is no op \"" + name + "\"", "pass a full name such as aten::mm"});
  }
  std::vector<std::string> names;
  for (const c10::OperatorHandle& each : found) {
    const std::string& overload = each.schema().overload_name();
    const bool fits = dot == op.npos ? takes(each.schema(), num_tensors) : overload == op.substr(dot + 1);
    if (fits) return each;
    names.push_back(overload.empty() ? name : name + "." + overload);
  }
  // One that needs further arguments, as long as there is no doubt which.
  if (dot == op.npos && found.size() == 1) return found[0];
  const auto plain =
      std::find_if(found.begin(), found.end(), [](const auto& o) { return o.schema().overload_name().empty(); });
  if (dot == op.npos && plain != found.end()) return *plain;
  raise<c10::ValueError>({kExplain,
                          c10::str("no overload of ", name,
                                   dot == op.npos ? c10::str(" takes ", num_tensors, " tensors and nothing else")
                                                  : " is called \"" + op.substr(dot + 1) + "\"",
                                   "; known: ", c10::Join(", ", names)),
                          "name the overload, as in " + names.front()});
}

}  // namespace serried::detail
