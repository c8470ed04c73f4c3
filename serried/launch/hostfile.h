// Lists of hosts: --hosts a:4,b:4 and --hostfile FILE.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

struct Host {
  std::string name;   // as ssh takes it: "node1", "me@node1", "fe80::1"
  int num_ranks = 0;  // 0: as -n says
};

/// "a:4,me@b,[fe80::1]:2". LaunchError that names the column of what is wrong.
std::vector<Host> parse_hosts(const std::string& text);

/// A host per line, with or without its number of ranks: "a:4", "a slots=4", "a". What follows a # is left out.
/// LaunchError that names the line and the column of what is wrong, or says why the file cannot be read.
std::vector<Host> read_hostfile(const std::string& path);

}  // namespace serried::launch
