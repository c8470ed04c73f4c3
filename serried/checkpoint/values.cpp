// Values to JSON and back.
#include "serried/checkpoint/values.h"

#include <c10/util/StringUtil.h>
#include <c10/util/overloaded.h>

#include <cmath>
#include <cstdint>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"

namespace serried::checkpoint {

using detail::ValueContent;

Value::Value(State state) : content_(std::make_shared<ValueContent>(ValueContent{std::move(state)})) {}
Value::Value(c10::IValue value) : content_(std::make_shared<ValueContent>(ValueContent{std::move(value)})) {}
Value::Value(const at::Tensor& tensor) : Value(c10::IValue(tensor)) {}
Value::Value(bool value) : Value(c10::IValue(value)) {}
Value::Value(const char* text) : Value(c10::IValue(std::string(text))) {}
Value::Value(std::string text) : Value(c10::IValue(std::move(text))) {}
Value::Value(std::initializer_list<Entry> entries) : Value(std::vector<Entry>(entries)) {}
Value::Value(const std::vector<Entry>& entries) : content_(std::make_shared<ValueContent>(ValueContent{entries})) {}
Value::Value(int64_t* variable) : content_(std::make_shared<ValueContent>(ValueContent{detail::Variable(variable)})) {}
Value::Value(int* variable) : content_(std::make_shared<ValueContent>(ValueContent{detail::Variable(variable)})) {}
Value::Value(double* variable) : content_(std::make_shared<ValueContent>(ValueContent{detail::Variable(variable)})) {}
Value::Value(std::string* variable)
    : content_(std::make_shared<ValueContent>(ValueContent{detail::Variable(variable)})) {}
Value::Value(bool* variable) : content_(std::make_shared<ValueContent>(ValueContent{detail::Variable(variable)})) {}

void Value::check_fits(uint64_t number) {
  if (number <= uint64_t(INT64_MAX)) return;
  raise<c10::ValueError>({"checkpoint", c10::str("the value ", number, " is more than an int64_t holds"),
                          "save it as a text, or as a tensor of uint64"});
}

const c10::IValue& Value::value() const {
  return std::get<c10::IValue>(content_->content);
}

namespace detail {
namespace {

using c10::IValue;
using nlohmann::json;

constexpr const char* kTensor = "$tensor";
constexpr const char* kNumber = "$number";
constexpr const char* kBytes = "$bytes";
constexpr int kMaxValueDepth = 64;  // of a value that is saved; a file may have more

// The text behind a key that begins with "$": in a file that somebody has made it may be anything.
std::string text_behind(const json& object, const char* key) {
  if (object.at(key).is_string()) return object.at(key).get<std::string>();
  fail(c10::str("a value is damaged: ", object.dump().substr(0, 100)), "use another checkpoint");
}

[[noreturn]] void refuse_value(const std::string& path, const std::string& what) {
  fail(c10::str("\"", path, "\" is ", what),
       "save numbers, texts, truth values, tensors, lists and dicts of these by text, or a state_of(...) by itself");
}

std::string hex_of(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (char byte : bytes) {
    text += kDigits[uint8_t(byte) >> 4];
    text += kDigits[uint8_t(byte) & 15];
  }
  return text;
}

std::string bytes_of_hex(const std::string& text) {
  const auto digit = [](char c) { return c >= 'a' ? c - 'a' + 10 : c - '0'; };
  if (text.size() % 2 != 0 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    fail("a text in hex is damaged", "use another checkpoint");
  }
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) bytes += char(digit(text[i]) * 16 + digit(text[i + 1]));
  return bytes;
}

json text_json(const std::string& text) {
  if (is_utf8(text)) return text;
  return {{kBytes, hex_of(text)}};
}

// Before a file is written that nobody could read.
void check_depth(const std::string& path, int depth) {
  if (depth > kMaxValueDepth) refuse_value(path, c10::str("nested more than ", kMaxValueDepth, " deep"));
}

// JSON takes no other.
std::string utf8_key(const std::string& key, const std::string& path) {
  if (is_utf8(key)) return escaped_key(key);
  refuse_value(serried::detail::printable(path),
               "a dict with a key that is not UTF-8: \"" + serried::detail::printable(key) + "\"");
}

json json_of_ivalue(const IValue& value, const std::string& path, std::vector<Item>& items, int depth) {
  check_depth(path, depth);
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return number_json(value.toDouble());
  if (value.isString()) return text_json(value.toStringRef());
  if (value.isTensor()) {
    if (!value.toTensor().defined()) refuse_value(path, "an undefined tensor");
    items.push_back({path, value.toTensor(), Holder::all});
    return {{kTensor, path}};
  }
  if (value.isList()) {
    json list = json::array();
    for (const IValue& item : value.toListRef()) {
      list.push_back(json_of_ivalue(item, path + "." + std::to_string(list.size()), items, depth + 1));
    }
    return list;
  }
  if (!value.isGenericDict()) refuse_value(path, "of type " + value.tagKind());
  json object = json::object();
  for (const auto& item : value.toGenericDict()) {
    if (!item.key().isString()) refuse_value(path, "a dict with keys of type " + item.key().tagKind());
    const std::string& key = item.key().toStringRef();
    object[utf8_key(key, path)] = json_of_ivalue(item.value(), path + "." + key, items, depth + 1);
  }
  return object;
}

json json_of_entries(const std::vector<Entry>& entries, const std::string& path, std::vector<Item>& items, int depth) {
  check_depth(path, depth);
  json object = json::object();
  for (const Entry& entry : entries) {
    const std::string inner = path + "." + entry.name;
    if (!object.emplace(utf8_key(entry.name, path), json_of(entry.value, inner, items, depth + 1)).second) {
      refuse_value(inner, "there twice");
    }
  }
  return object;
}

// What writes the variable later; Failure where the value does not fit.
std::function<void()> writing(const Variable& variable, const json& saved, const std::string& path) {
  const auto require = [&](bool holds, const char* wanted) {
    if (holds) return;
    fail(c10::str("\"", path, "\" is ", saved.dump().substr(0, 100), " in the checkpoint, and is loaded into ", wanted),
         "pass a pointer to a variable of the type that was saved");
  };
  const auto set = [](auto* to, auto value) { return std::function<void()>([to, value] { *to = value; }); };
  return std::visit(c10::overloaded(
                        [&](int64_t* to) {
                          require(saved.is_number_integer(), "an int64_t");
                          return set(to, saved.get<int64_t>());
                        },
                        [&](int* to) {
                          const int64_t value = saved.is_number_integer() ? saved.get<int64_t>() : INT64_MAX;
                          require(value == int(value), "an int");
                          return set(to, int(value));
                        },
                        [&](double* to) { return set(to, number_of(saved)); },
                        [&](std::string* to) {
                          const IValue text = value_of(saved, {});
                          require(text.isString(), "a std::string");
                          return set(to, text.toStringRef());
                        },
                        [&](bool* to) {
                          require(saved.is_boolean(), "a bool");
                          return set(to, saved.get<bool>());
                        }),
                    variable);
}

void want_ivalue(const IValue& value, const std::string& path, const json& saved, Wanted& wanted) {
  if (!value.isTensor()) {
    fail(c10::str("\"", path, "\" is loaded into a constant"),
         c10::str("pass a pointer to a variable, or call read_value(path, \"", path, "\")"));
  }
  if (!saved.is_object() || !saved.contains(kTensor)) {
    fail(c10::str("\"", path, "\" is ", saved.dump().substr(0, 100), " in the checkpoint, and is loaded into a tensor"),
         "pass a pointer to a variable of the type that was saved");
  }
  wanted.targets.push_back({text_behind(saved, kTensor), value.toTensor()});
}

void want_entries(const std::vector<Entry>& entries, const std::string& path, const json& saved, Wanted& wanted) {
  for (const Entry& entry : entries) {
    const std::string inner = path + "." + entry.name;
    const std::string key = escaped_key(entry.name);
    if (!saved.is_object() || !saved.contains(key)) {
      wanted.missing.push_back(inner);
    } else {
      want_value(entry.value, inner, saved[key], wanted);
    }
  }
}

}  // namespace

bool is_utf8(const std::string& text) {
  try {
    (void)json(text).dump();
    return true;
  } catch (const json::type_error&) {
    return false;
  }
}

std::string escaped_key(const std::string& name) {
  return name.empty() || name.front() != '$' ? name : "$" + name;
}

json number_json(double number) {
  if (std::isfinite(number)) return number;
  return {{kNumber, std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
}

double number_of(const json& json) {
  if (json.is_number()) return json.get<double>();
  const std::string name = json.is_object() && json.contains(kNumber) ? text_behind(json, kNumber) : "";
  if (name == "nan") return std::nan("");
  if (name == "inf") return HUGE_VAL;
  if (name == "-inf") return -HUGE_VAL;
  fail(json.dump().substr(0, 100) + " in the checkpoint is no number", "load a value of the type that was saved");
}

json json_of(const Value& value, const std::string& path, std::vector<Item>& items, int depth) {
  return std::visit(
      c10::overloaded([&](const IValue& plain) { return json_of_ivalue(plain, path, items, depth); },
                      [&](const State&) -> json { refuse_value(path, "a state inside another value"); },
                      [&](const std::vector<Entry>& entries) { return json_of_entries(entries, path, items, depth); },
                      [&](const Variable& variable) {
                        return std::visit([&](const auto* from) { return json_of_ivalue(*from, path, items, depth); },
                                          variable);
                      }),
      value.content().content);
}

IValue value_of(const json& json, const std::function<at::Tensor(const std::string&)>& read_tensor) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& item : json) list.push_back(value_of(item, read_tensor));
    return list;
  }
  if (json.contains(kTensor) && read_tensor) return read_tensor(text_behind(json, kTensor));
  if (json.contains(kNumber)) return number_of(json);
  if (json.contains(kBytes)) return bytes_of_hex(text_behind(json, kBytes));
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, item] : json.items()) {
    dict.insert(key.substr(key.starts_with("$$") ? 1 : 0), value_of(item, read_tensor));
  }
  return dict;
}

void want_value(const Value& value, const std::string& path, const json& saved, Wanted& wanted) {
  std::visit(c10::overloaded([&](const IValue& plain) { want_ivalue(plain, path, saved, wanted); },
                             [&](const State&) { refuse_value(path, "a state inside another value"); },
                             [&](const std::vector<Entry>& entries) { want_entries(entries, path, saved, wanted); },
                             [&](const Variable& variable) {
                               wanted.apply = [before = std::move(wanted.apply),
                                               write = writing(variable, saved, path)] {
                                 if (before) before();
                                 write();
                               };
                             }),
             value.content().content);
}

const json* find_value(const json& values, const std::string& name) {
  const auto whole = values.find(escaped_key(name));
  if (whole != values.end()) return &*whole;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    const auto outer = values.find(escaped_key(name.substr(0, dot)));
    if (outer == values.end() || !outer->is_object()) continue;
    if (const json* inner = find_value(*outer, name.substr(dot + 1))) return inner;
  }
  return nullptr;
}

}  // namespace detail
}  // namespace serried::checkpoint
