// `serried trace merge`: its options, help and what it prints.
#pragma once

#include <string>
#include <vector>

#include "serried/base/traces/merge.h"

namespace CLI {
class App;
}

namespace serried::tools {

class TraceCommand {
 public:
  static constexpr const char* kName = "trace";

  /// Adds the subcommand to `app`.
  explicit TraceCommand(CLI::App& app);

  /// Whether the command line asked for it.
  bool chosen() const;

  /// Merges, and prints what the trace says. The code to exit with, after an error on stderr.
  int execute() const;

 private:
  std::string output() const;
  trace::MergeReport merge() const;

  CLI::App* command_;
  CLI::App* merge_;
  std::vector<std::string> inputs_;
  std::string output_;
  std::string progress_;
};

}  // namespace serried::tools
