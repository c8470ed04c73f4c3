// `serried run --hosts`: starts a launcher on every host by ssh, and shows what they all print.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/hostfile.h"
#include "serried/launch/options.h"

namespace serried::launch {

struct FleetOptions {
  std::vector<Host> hosts = {};
  std::vector<std::string> ssh = {"ssh"};  // its words
  std::vector<std::string> exports = {};   // names of variables for the ranks, besides SERRIED_* and OMP_*
  bool counts_cores = false;               // -n auto: each host has as many ranks as cores
};

/// Runs the job of `options` with one node per host, of which the first is node 0, and returns what that one's launcher
/// ends with. LaunchError if not all of them begin. No launcher of ours is left when it returns or throws.
int run_on_hosts(const Options& options, const FleetOptions& fleet);

/// The other side: a launcher on one of the hosts, which learns from stdin what to do.
int run_as_node();

}  // namespace serried::launch
