// Lookup of serried-<command>.
#include "tools/serried/external.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "serried/base/edit_distance.h"
#include "serried/launch/error.h"

namespace serried::tools {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kPrefix = "serried-";
constexpr size_t kColumn = 28;  // where CLI11 begins its texts, less the two spaces before a name

std::vector<fs::path> folders() {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  return {here, here.parent_path() / "libexec" / "serried"};
}

// What the commands of this repository do; others are shown by name.
std::string_view summary_of(const std::string& name) {
  constexpr std::pair<std::string_view, std::string_view> kSummaries[] = {
      {"bench", "Measure what serried plan --simulate has to know of machines"},
      {"checkpoint", "List, verify and compare checkpoints"},
      {"doctor", "Say what works on this machine, and why the rest does not"},
      {"explain", "Show how an op runs on spread tensors, and what it sends"},
      {"plan", "Count or simulate what a training step costs each of many ranks, or draw a pipeline"}};
  for (const auto& [known, summary] : kSummaries) {
    if (known == name) return summary;
  }
  return "";
}

std::set<std::string> external_commands() {
  std::set<std::string> names;
  for (const fs::path& folder : folders()) {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename();
      if (!name.starts_with(kPrefix) || !entry.is_regular_file(error)) continue;
      if (::access(entry.path().c_str(), X_OK) == 0) names.insert(name.substr(kPrefix.size()));
    }
  }
  return names;
}

std::string suggestion_for(const std::string& command, const std::set<std::string>& known) {
  constexpr size_t kMostChanges = 2;
  for (const std::string& name : known) {
    if (detail::edit_distance(command, name) <= kMostChanges || name.starts_with(command)) {
      return "serried " + name + "?";
    }
  }
  return "serried --help, or serried run -n 4 " + command + " to start a program";
}

}  // namespace

std::string describe_external_commands() {
  std::string text;
  for (const std::string& name : external_commands()) {
    const std::string_view summary = summary_of(name);
    text += "\n  " + name;
    if (!summary.empty()) text += std::string(kColumn > name.size() ? kColumn - name.size() : 1, ' ').append(summary);
  }
  return text.empty() ? " none found" : text;
}

int exec_external_command(const std::string& command, char** arguments, const std::vector<std::string>& own) {
  const bool is_name = command.find('/') == std::string::npos;
  for (const fs::path& folder : folders()) {
    const std::string path = folder / (std::string(kPrefix) + command);
    if (!is_name || ::access(path.c_str(), X_OK) != 0) continue;
    ::execv(path.c_str(), arguments);
    std::cerr << "[serried] cannot start " << path << ": " << std::strerror(errno)
              << "\n  fix: install serried again\n";
    return launch::kExitNotExecutable;
  }
  std::set<std::string> known = external_commands();
  known.insert(own.begin(), own.end());
  std::string names;
  for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
  std::cerr << "[serried] unknown command \"" << command << "\"; known: " << names
            << "\n  fix: " << suggestion_for(command, known) << "\n";
  return launch::kExitUsage;
}

}  // namespace serried::tools
