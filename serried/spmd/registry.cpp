// Finds the rule of an op: users' rules first, then the tables, then the dispatcher's tags.
#include "serried/spmd/registry.h"
#include "serried/spmd/registry.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "serried/base/error.h"
#include "serried/spmd/fixups.h"
#include "serried/spmd/plan.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

// Users' rules by "ns::name" or "ns::name.overload".
struct UserRules {
  std::shared_mutex mutex;
  std::map<std::string, Rule, std::less<>> rules;
};

UserRules& user_rules() {
  static UserRules rules;
  return rules;
}

const std::unordered_map<std::string_view, const RuleEntry*>& built_in() {
  static const auto index = [] {
    std::unordered_map<std::string_view, const RuleEntry*> map;
    for (const RuleTable& table : rule_tables()) {
      for (const RuleEntry& entry : table.entries) map.emplace(entry.name, &entry);
    }
    return map;
  }();
  return index;
}

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

std::string_view without_namespace(std::string_view name) {
  const size_t colons = name.find("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

bool is_in_place(const c10::FunctionSchema& schema) {
  if (!ends_with(schema.name(), "_") || schema.arguments().empty()) return false;
  const c10::AliasInfo* alias = schema.arguments()[0].alias_info();
  return alias != nullptr && alias->isWrite();
}

// The overload that the variant stands for: "Scalar_out" -> "Scalar", "ScalarList" -> "Scalar", "List" -> "Tensor".
std::string base_overload(const c10::FunctionSchema& schema) {
  std::string_view overload = schema.overload_name();
  if (ends_with(overload, "_out")) overload.remove_suffix(4);
  if (without_namespace(schema.name()).rfind("_foreach_", 0) == 0) {
    if (overload == "List") return "Tensor";
    if (overload == "ScalarList") return "Scalar";
  }
  return std::string(overload);
}

const RuleEntry* find_entry(std::string_view name, std::string_view overload) {
  const auto& index = built_in();
  if (!overload.empty()) {
    const auto exact = index.find(std::string(name) + "." + std::string(overload));
    if (exact != index.end()) return exact->second;
  }
  const auto any = index.find(name);
  return any == index.end() ? nullptr : any->second;
}

const RuleEntry* find_entry(const c10::FunctionSchema& schema) {
  const std::string overload = base_overload(schema);
  if (const RuleEntry* own = find_entry(without_namespace(schema.name()), overload)) return own;
  const std::string base = base_name(schema);
  return find_entry(base, overload);
}

bool is_pointwise(const std::string& name, const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  return op && op->hasTag(at::Tag::pointwise);
}

// The op itself, or for a foreach op the one it applies to each element, is tagged pointwise.
bool is_pointwise(const c10::FunctionSchema& schema) {
  if (is_pointwise(schema.name(), schema.overload_name())) return true;
  const std::string base = "aten::" + base_name(schema);
  for (const char* overload : {"", "Tensor", "Scalar", "Tensor_Scalar", "default", "self"}) {
    if (is_pointwise(base, overload)) return true;
  }
  return false;
}

Rule pointwise_rule(const Call& call) {
  std::string text;
  for (size_t i = 0; i < call.tensors().size(); ++i) text += i == 0 ? "!..." : ", !...";
  const size_t num_outputs = std::max<size_t>(call.schema().returns().size(), 1);
  for (size_t i = 0; i < num_outputs; ++i) text += i == 0 ? " -> ..." : ", ...";
  return parse_or_raise("find_rule", call.schema().name(), text);
}

std::optional<Rule> find_user_rule(const c10::FunctionSchema& schema) {
  UserRules& users = user_rules();
  std::shared_lock lock(users.mutex);
  if (users.rules.empty()) return std::nullopt;
  for (const std::string& key : {schema.name() + "." + schema.overload_name(), schema.name()}) {
    const auto found = users.rules.find(key);
    if (found != users.rules.end()) return found->second;
  }
  return std::nullopt;
}

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> result;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(" \n", begin)) != std::string_view::npos) {
    const size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    result.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return result;
}

}  // namespace

std::vector<RuleEntry> each(RuleText rule, std::string_view names) {
  std::vector<RuleEntry> entries;
  for (std::string_view name : words(names)) entries.emplace_back(name, rule);
  return entries;
}

std::vector<RuleEntry> each(DynamicRule rule, std::string_view names) {
  std::vector<RuleEntry> entries;
  for (std::string_view name : words(names)) entries.emplace_back(name, rule);
  return entries;
}

std::string base_name(const c10::FunctionSchema& schema) {
  std::string_view name = without_namespace(schema.name());
  if (name.rfind("_foreach_", 0) == 0) name.remove_prefix(9);
  if (is_in_place(schema)) name.remove_suffix(1);
  if (ends_with(name, "_copy") && built_in().count(name) == 0 && built_in().count(name.substr(0, name.size() - 5))) {
    name.remove_suffix(5);
  }
  return std::string(name);
}

bool is_dynamic(const c10::FunctionSchema& schema) {
  const RuleEntry* entry = find_entry(schema);
  return entry != nullptr && entry->dynamic != nullptr;
}

std::optional<Rule> find_rule(const Call& call) {
  const c10::FunctionSchema& schema = call.schema();
  if (auto rule = find_user_rule(schema)) return rule;
  if (schema.name().rfind("aten::", 0) != 0) return std::nullopt;
  const RuleEntry* entry = find_entry(schema);
  if (entry == nullptr) {
    if (!is_pointwise(schema)) return std::nullopt;
    return pointwise_rule(call);
  }
  if (entry->dynamic == nullptr) {
    Rule rule;
    parse(entry->text, rule);
    return rule;
  }
  const std::string text = entry->dynamic(call);
  if (text.empty()) return std::nullopt;
  return parse_or_raise("find_rule", schema.name(), text);
}

void register_rule(const std::string& op, const std::string& rule) {
  const Rule parsed = parse_or_raise("register_sharding", op, rule);
  for (const FixupPattern& fixup : parsed.fixups) {
    if (find_fixup(fixup.name) != nullptr) continue;
    raise<c10::ValueError>({"register_sharding", c10::str("rule for ", op, ": there is no fix-up \"", fixup.name, "\""),
                            "use one of " + c10::Join(", ", fixup_names())});
  }
  UserRules& users = user_rules();
  std::unique_lock lock(users.mutex);
  users.rules.insert_or_assign(op, parsed);
  make_plans_stale();
}

void unregister_rule(const std::string& op) {
  UserRules& users = user_rules();
  std::unique_lock lock(users.mutex);
  users.rules.erase(op);
  make_plans_stale();
}

const std::vector<RuleTable>& rule_tables() {
  static const std::vector<RuleTable> tables = {
      pointwise_rules(), contraction_rules(), linalg_rules(), norm_rules(), attention_rules(), conv_rules(),
      pooling_rules(),   loss_rules(),        optim_rules(),  view_rules(), reduction_rules(), index_rules(),
      shape_rules(),     sort_rules(),        like_rules(),   fft_rules(),
  };
  return tables;
}

}  // namespace serried::spmd
