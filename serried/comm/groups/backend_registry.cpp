// One table of backends: the built-in ones, and those that users add.
#include "serried/comm/groups/backend_registry.h"

#include <algorithm>
#include <map>
#include <mutex>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/groups/builtin_backends.h"

namespace serried {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> added;
};

Registry& registry() {
  static auto* all = new Registry();
  return *all;
}

const detail::BuiltinBackend* find_builtin(const std::string& name) {
  for (const detail::BuiltinBackend& backend : detail::builtin_backends()) {
    if (name == backend.name) return &backend;
  }
  return nullptr;
}

[[noreturn]] void raise_unknown(std::string_view where, const std::string& name) {
  raise<c10::ValueError>({where,
                          c10::str("unknown backend \"", name, "\"; known: ", c10::Join(", ", registered_backends())),
                          "pass one of the known names, or register_backend first"});
}

}  // namespace

BackendFactory detail::find_backend(std::string_view where, const std::string& name) {
  if (const BuiltinBackend* builtin = find_builtin(name)) return builtin->factory;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().added.find(name);
    if (found != registry().added.end()) return found->second;
  }
  raise_unknown(where, name);
}

void register_backend(const std::string& name, BackendFactory factory) {
  if (name.empty() || !factory) {
    raise<c10::ValueError>({"register_backend",
                            name.empty() ? "the name is empty" : "the factory of \"" + name + "\" is empty",
                            "pass a name and a function that makes a group"});
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (find_builtin(name) == nullptr && registry().added.emplace(name, std::move(factory)).second) return;
  raise<c10::ValueError>({"register_backend", c10::str("the backend \"", name, "\" is already registered"),
                          "choose another name, or unregister_backend first"});
}

void unregister_backend(const std::string& name) {
  if (find_builtin(name) != nullptr) {
    raise<c10::ValueError>(
        {"unregister_backend", c10::str("\"", name, "\" is built in"), "unregister only what register_backend added"});
  }
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().added.erase(name) == 1) return;
  }
  raise_unknown("unregister_backend", name);
}

std::vector<std::string> registered_backends() {
  std::vector<std::string> names;
  for (const detail::BuiltinBackend& backend : detail::builtin_backends()) names.emplace_back(backend.name);
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [name, factory] : registry().added) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

std::string why_backend_unavailable(const std::string& name) {
  if (const detail::BuiltinBackend* builtin = find_builtin(name)) return builtin->why_unavailable();
  detail::find_backend("why_backend_unavailable", name);
  return "";
}

bool is_backend_available(const std::string& name) {
  const std::vector<std::string> names = registered_backends();
  return std::binary_search(names.begin(), names.end(), name) && why_backend_unavailable(name).empty();
}

}  // namespace serried
