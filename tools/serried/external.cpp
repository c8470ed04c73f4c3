// Lookup of serried-<command>.
#include "tools/serried/external.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <set>
#include <vector>

#include "serried/launch/error.h"

namespace serried::tools {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kPrefix = "serried-";

std::vector<fs::path> folders() {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  return {here, here.parent_path() / "libexec" / "serried"};
}

}  // namespace

std::string list_external_commands() {
  std::set<std::string> names;
  for (const fs::path& folder : folders()) {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename();
      if (!name.starts_with(kPrefix) || !entry.is_regular_file(error)) continue;
      if (::access(entry.path().c_str(), X_OK) == 0) names.insert(name.substr(kPrefix.size()));
    }
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none found" : text;
}

int exec_external_command(const std::string& command, char** arguments) {
  const bool is_name = command.find('/') == std::string::npos;
  for (const fs::path& folder : folders()) {
    const std::string path = folder / (std::string(kPrefix) + command);
    if (!is_name || ::access(path.c_str(), X_OK) != 0) continue;
    ::execv(path.c_str(), arguments);
    std::cerr << "[serried] cannot start " << path << ": " << std::strerror(errno)
              << "\n  fix: install serried again\n";
    return launch::kExitNotExecutable;
  }
  const std::string external = list_external_commands();
  std::cerr << "[serried] unknown command \"" << command << "\"; known: run, top, trace"
            << (external == "none found" ? "" : ", " + external) << "\n  fix: serried --help, or serried run -n 4 "
            << command << " to start a program\n";
  return launch::kExitUsage;
}

}  // namespace serried::tools
