// `serried top`: its options and help, and the loop that looks again.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace serried::tools {

class TopCommand {
 public:
  static constexpr const char* kName = "top";

  /// Adds the subcommand to `app`.
  explicit TopCommand(CLI::App& app);

  /// Whether the command line asked for it.
  bool chosen() const;

  /// The code to exit with.
  int execute();

 private:
  CLI::App* command_;
  std::string job_;
  bool once_ = false;
  bool json_ = false;
  double interval_ = 1;
};

}  // namespace serried::tools
