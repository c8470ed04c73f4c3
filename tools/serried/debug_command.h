// `serried debug dump` and `serried debug show`: their options and help.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace serried::tools {

class DebugCommand {
 public:
  static constexpr const char* kName = "debug";

  /// Adds the subcommand to `app`.
  explicit DebugCommand(CLI::App& app);

  /// Whether the command line asked for it.
  bool chosen() const;

  /// As far as the command line said which of them: "debug dump".
  std::string asked() const;

  /// The code to exit with, after an error on stderr.
  int execute() const;

 private:
  int dump() const;
  int show() const;

  CLI::App* command_;
  CLI::App* dump_;
  CLI::App* show_;
  std::string job_;
  std::string output_ = "dump";
  double patience_ = 10;
  std::string folder_;
};

}  // namespace serried::tools
