// Every environment variable serried reads, with its default, in one table.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace serried::env {

struct Variable {
  const char* name;
  const char* fallback;  // text of the default; "" where there is none
  const char* meaning;
};

/// The whole table, for `serried doctor` and the docs.
std::span<const Variable> table();

/// The value of a variable of the table, or its default. Empty counts as unset.
/// A name that the table lacks is an internal error, so the table stays complete.
std::string text(std::string_view name);

/// As `text`, but nullopt where the variable is unset and has no default.
std::optional<std::string> maybe_text(std::string_view name);

/// The value as a whole number; ValueError that names the variable if it is none.
int64_t integer(std::string_view name);

/// As `integer`, but nullopt where the variable is unset and has no default.
std::optional<int64_t> maybe_integer(std::string_view name);

/// True for 1, true, yes, on; false for 0, false, no, off; else ValueError.
bool flag(std::string_view name);

}  // namespace serried::env
