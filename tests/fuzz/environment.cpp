// Environment variables: each line of the input is NAME=value, where # stands for the next variable of the table.
#include "tests/fuzz/target.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>

#include "serried/base/env.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/nan_check.h"
#include "serried/comm/groups/group.h"
#include "serried/comm/rendezvous/launch_environment.h"

namespace serried::fuzz {
namespace {

// All variables of the table, as they were once this goes.
class SavedEnvironment {
 public:
  SavedEnvironment() {
    for (const env::Variable& variable : env::table()) {
      const char* value = std::getenv(variable.name);
      saved_.emplace_back(variable.name, value == nullptr ? std::nullopt : std::optional<std::string>(value));
      ::unsetenv(variable.name);
    }
  }
  ~SavedEnvironment() {
    for (const auto& [name, value] : saved_) {
      value ? ::setenv(name, value->c_str(), 1) : ::unsetenv(name);
    }
  }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> saved_;
};

void set_variable(std::string_view line, size_t& next) {
  const size_t equals = std::min(line.find('='), line.size());
  const std::string_view name = line.substr(0, equals);
  const std::string value(line.substr(std::min(equals + 1, line.size())));
  for (const env::Variable& variable : env::table()) {
    const bool is_next = name == "#" && variable.name == env::table()[next % env::table().size()].name;
    if (name == variable.name || is_next) ::setenv(variable.name, value.c_str(), 1);
  }
  ++next;
}

void read_values() {
  for (const env::Variable& variable : env::table()) {
    succeeds<c10::ValueError>([&] { env::flag(variable.name); });
    succeeds<c10::ValueError>([&] { env::maybe_integer(variable.name); });
  }
  succeeds<c10::ValueError>([] { require(default_timeout().count() > 0, "a timeout of nothing"); });
  succeeds<c10::ValueError>([] { detail::read_launch_environment({.rank = 0, .world_size = 1}); });
  succeeds<c10::ValueError>([] {
    const detail::LaunchEnvironment job = detail::read_launch_environment({});
    // Empty where the variable held a number that no int can hold.
    for (const auto& [name, value] : {std::pair("RANK", job.rank), std::pair("WORLD_SIZE", job.world_size)}) {
      if (!env::maybe_text("RANK") && !env::maybe_text("WORLD_SIZE")) continue;
      require(env::integer(name) == value, std::string(name) + " was cut to another number");
    }
  });
}

}  // namespace

void run_environment(std::string_view bytes) {
  const SavedEnvironment saved;
  size_t next = 0;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string_view line = bytes.substr(begin, end - begin);
    if (line.find('\0') == std::string_view::npos) set_variable(line, next);
    begin = end + 1;
  }
  read_values();
}

}  // namespace serried::fuzz
