// Files of the trace, as `serried trace merge` takes them. An input is two of them with a zero byte between.
#include "tests/fuzz/target.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "serried/base/traces/merge.h"

namespace serried::fuzz {
namespace {

// A folder of its own for each process, gone with it.
class ScratchFolder {
 public:
  ScratchFolder() : path_("/tmp/serried_fuzz_traces_" + std::to_string(::getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  const std::string path_;
};

}  // namespace

void run_trace_file(std::string_view bytes) {
  static const ScratchFolder folder;
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  std::ofstream(folder.file("a.json"), std::ios::binary) << bytes.substr(0, end);
  std::ofstream(folder.file("b.json"), std::ios::binary) << bytes.substr(std::min(end + 1, bytes.size()));
  const std::string output = folder.file("merged");
  succeeds<trace::TraceError>([&] {
    const trace::MergeReport report = trace::merge_traces({.inputs = {folder.file("")}, .output = output});
    require(!trace::to_text(report.summary).empty(), "a summary that says nothing");
    std::ifstream file(output);
    require(nlohmann::json::accept(file), "a merged trace that is no JSON");
  });
}

}  // namespace serried::fuzz
