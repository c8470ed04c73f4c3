// Environment variables for the length of a test.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace serried::testing {

/// Sets variables ("" unsets) and puts the former values back at the end.
class ScopedEnv {
 public:
  explicit ScopedEnv(const std::map<std::string, std::string>& values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name.c_str());
      previous_[name] = old == nullptr ? std::nullopt : std::optional<std::string>(old);
      put(name, value);
    }
  }
  ScopedEnv(std::initializer_list<std::pair<const std::string, std::string>> values)
      : ScopedEnv(std::map<std::string, std::string>(values)) {}
  ~ScopedEnv() {
    for (const auto& [name, value] : previous_) put(name, value.value_or(""));
  }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  static void put(const std::string& name, const std::string& value) {
    if (value.empty()) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }

  std::map<std::string, std::optional<std::string>> previous_;
};

}  // namespace serried::testing
