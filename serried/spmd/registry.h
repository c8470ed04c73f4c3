// Which rule belongs to which op: built-in tables by base name, users' rules by full name.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serried/spmd/op_call.h"
#include "serried/spmd/rule.h"

namespace serried::spmd {

/// A rule that depends on shapes or arguments: it returns the text. An empty text means: no rule for this call.
using DynamicRule = std::string (*)(const Call& call);

/// A line of a table: the rule of all overloads of `name`, or of one with "name.overload".
struct RuleEntry {
  std::string_view name;
  const char* text = nullptr;  // or
  DynamicRule dynamic = nullptr;

  constexpr RuleEntry(std::string_view op, RuleText rule) : name(op), text(rule.text) {}
  constexpr RuleEntry(std::string_view op, DynamicRule rule) : name(op), dynamic(rule) {}
};

/// One table per family, in spmd/rules/.
struct RuleTable {
  std::string_view family;
  std::vector<RuleEntry> entries;
};

/// Many ops, one rule: names separated by spaces.
std::vector<RuleEntry> each(RuleText rule, std::string_view names);
std::vector<RuleEntry> each(DynamicRule rule, std::string_view names);

/// All built-in tables, for the verifier, the docs and `explain`.
const std::vector<RuleTable>& rule_tables();

/// The rule for `call`: a user's, else a table's (for an in-place, out= or _copy variant that of its base name), else
/// by the op's tags (pointwise). None: the replicate default.
std::optional<Rule> find_rule(const Call& call);

/// The base name whose rule serves `schema`: "add_" -> "add", "mm.out" -> "mm", "_foreach_add" -> "add",
/// "expand_copy" -> "expand".
std::string base_name(const c10::FunctionSchema& schema);

/// Whether the rule of `schema` looks at numbers among the arguments, which then decide plans.
bool is_dynamic(const c10::FunctionSchema& schema);

/// Adds or replaces a user's rule; `op` is "ns::name" or "ns::name.overload". ValueError for a malformed text.
void register_rule(const std::string& op, const std::string& rule);
void unregister_rule(const std::string& op);

}  // namespace serried::spmd
