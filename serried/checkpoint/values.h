// Values beside states: as the user gives them, and as JSON in a checkpoint.
#pragma once

#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {

/// A variable of the caller's.
using Variable = std::variant<int64_t*, int*, double*, std::string*, bool*>;

struct ValueContent {
  std::variant<c10::IValue, State, std::vector<Entry>, Variable> content;
};

/// Numbers, texts and containers as JSON. What JSON lacks is an object with one key that begins with "$": a tensor by
/// its name, a number that is not finite, a text that is not UTF-8. A tensor found on the way goes to `items`, under
/// the path of its name.
nlohmann::json json_of(const Value& value, const std::string& path, std::vector<Item>& items, int depth = 0);

/// Back again; `read_tensor` gives the tensor of a name. Failure for what json_of does not write.
c10::IValue value_of(const nlohmann::json& json, const std::function<at::Tensor(const std::string&)>& read_tensor);

/// What a load does with a value: tensors get targets, variables are written by `apply`, constants are refused.
void want_value(const Value& value, const std::string& path, const nlohmann::json& saved, Wanted& wanted);

/// A user's name of a key inside a JSON object of ours, where "$" has a meaning.
bool is_utf8(const std::string& text);
std::string escaped_key(const std::string& name);

/// "run.seed" inside {"run": {"seed": 1}}; null where there is none.
const nlohmann::json* find_value(const nlohmann::json& values, const std::string& name);

/// Doubles that JSON cannot have included.
nlohmann::json number_json(double number);
double number_of(const nlohmann::json& json);

}  // namespace serried::checkpoint::detail
