// `serried rendezvous`: its options and help.
#pragma once

#include <string>

#include "serried/launch/options.h"

namespace CLI {
class App;
}

namespace serried::tools {

class RendezvousCommand {
 public:
  static constexpr const char* kName = "rendezvous";

  /// Adds the subcommand to `app`.
  explicit RendezvousCommand(CLI::App& app);

  /// Whether the command line asked for it.
  bool chosen() const;

  /// Leads the job to its end. The code to exit with. LaunchError for mistakes.
  int execute();

 private:
  CLI::App* command_;
  launch::Options options_{.num_ranks = 0};
  double grace_seconds_;
  double join_seconds_;
  double last_call_seconds_;
  double lost_seconds_;
  double sit_out_seconds_;
  double slow_seconds_;
  std::string nodes_ = "1";
};

}  // namespace serried::tools
