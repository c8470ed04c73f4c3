// Where plug-ins lie, and what is wrong with one that is no use.
#include "serried/base/plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <sstream>
#include <vector>

#include "serried/base/env.h"
#include "serried/base/plugin_abi.h"

namespace serried::detail {
namespace {

namespace fs = std::filesystem;

// Of the library that this code is in, or the program where that is static.
fs::path own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&find_plugin), &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::path(info.dli_fname).parent_path();
}

std::vector<fs::path> folders() {
  std::vector<fs::path> result;
  std::istringstream list(env::text("SERRIED_PLUGIN_PATH"));
  for (std::string folder; std::getline(list, folder, ':');) {
    if (!folder.empty()) result.emplace_back(folder);
  }
  result.push_back(own_folder());
  return result;
}

std::string last_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown" : text;
}

FoundPlugin open_plugin(const std::string& path, const char* symbol) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {.path = path, .why_not = "cannot be opened: " + last_error()};
  const auto* found = static_cast<const PluginSymbol*>(::dlsym(library, symbol));
  if (found == nullptr) return {.path = path, .why_not = path + " has no symbol " + symbol};
  if (std::string_view(found->abi) == kPluginAbi) return {.function = found->function, .path = path};
  return {.path = path, .why_not = path + " was built with " + found->abi + ", this library is " + kPluginAbi};
}

}  // namespace

FoundPlugin find_plugin(std::string_view name, const char* symbol) {
  const std::string file = "libserried_" + std::string(name) + ".so";
  std::string looked;
  for (const fs::path& folder : folders()) {
    std::error_code ignored;
    if (fs::exists(folder / file, ignored)) return open_plugin((folder / file).string(), symbol);
    looked += (looked.empty() ? "" : ", ") + folder.string();
  }
  return {.why_not = file + " is not in " + looked};
}

}  // namespace serried::detail
