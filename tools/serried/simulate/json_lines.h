// JSON objects of which every key knows its line.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <variant>

namespace serried::simulation {

/// An object inside of objects, numbers at the end: lists, texts and words have no place in a machine.
struct JsonObject {
  struct Entry;
  int line = 1;
  std::map<std::string, Entry> entries = {};
};

struct JsonObject::Entry {
  int line = 1;
  std::variant<double, JsonObject> value;
};

/// SimulationError, with name and line, for what is no JSON, nested deeper than any machine, or has a key twice.
JsonObject parse_json_lines(std::string_view text, const std::string& name);

}  // namespace serried::simulation
