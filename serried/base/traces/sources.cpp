// Folders are looked into, but not into folders in them.
#include "serried/base/traces/sources.h"

#include <algorithm>
#include <filesystem>

#include "serried/base/text.h"
#include "serried/base/traces/error.h"

namespace serried::trace {
namespace {

namespace fs = std::filesystem;

Source source_of(const std::string& path, bool is_named) {
  std::error_code error;
  const uint64_t bytes = fs::file_size(path, error);
  return {.path = path, .is_named = is_named, .bytes = error ? 0 : bytes};
}

std::vector<std::string> traces_in(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    std::error_code ignored;
    if (entry.path().extension() == ".json" && entry.is_regular_file(ignored)) found.push_back(entry.path());
  }
  if (error) {
    throw TraceError("cannot read " + in_quotes(folder) + ": " + error.message(), "pass a folder that you may read");
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::vector<Source> find_sources(const std::vector<std::string>& inputs) {
  std::vector<Source> sources;
  for (const std::string& input : inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    if (!fs::exists(status)) {
      throw TraceError("there is no " + in_quotes(input), "pass the folder that SERRIED_TRACE named, or files in it");
    }
    if (!fs::is_directory(status) && !fs::is_regular_file(status)) {
      throw TraceError(in_quotes(input) + " is no file, and traces are read twice", "write it to a file first");
    }
    if (!fs::is_directory(status)) {
      sources.push_back(source_of(input, /*is_named=*/true));
      continue;
    }
    for (const std::string& path : traces_in(input)) sources.push_back(source_of(path, /*is_named=*/false));
  }
  return sources;
}

std::string in_quotes(const std::string& path) {
  std::string text = "\"";
  return text.append(detail::printable(path)).append("\"");
}

}  // namespace serried::trace
