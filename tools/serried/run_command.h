// `serried run`: its options and help.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/fleet.h"
#include "serried/launch/options.h"

namespace CLI {
class App;
}

namespace serried::tools {

class RunCommand {
 public:
  static constexpr const char* kName = "run";

  /// Adds the subcommand to `app`.
  explicit RunCommand(CLI::App& app);

  /// Whether the command line asked for it.
  bool chosen() const;

  /// Runs the program that `app` was given, with the `rest` of the command line: all from the first "--" on.
  /// The code to exit with. LaunchError for mistakes.
  int execute(const std::vector<std::string>& rest);

 private:
  void take_slurm_nodes();
  int run_on_hosts();

  CLI::App* command_;
  launch::Options options_;
  double grace_seconds_;
  double join_seconds_;
  double last_call_seconds_;
  double lost_seconds_;
  double rejoin_seconds_;
  double sit_out_seconds_;
  double slow_seconds_;
  std::string nodes_ = "1";
  std::string only_ranks_;
  std::string hosts_;
  std::string hostfile_;
  std::string ssh_ = "ssh";
  bool as_node_ = false;
  launch::FleetOptions fleet_;
  std::string progress_;
};

}  // namespace serried::tools
