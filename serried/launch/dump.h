// What is left of a failure: a file per host with what its ranks did, for `serried debug show`.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "serried/launch/options.h"
#include "serried/launch/ranks.h"
#include "serried/launch/seen.h"

namespace serried::launch {

/// Adds to `seen` all calls that the boxes hold, and what is known of the clock.
void add_calls(HostSeen& seen, const std::map<int, const BlackBox*>& boxes);

/// Adds stacks of the processes that live, where eu-stack or gdb is there and may look at them, for as long as
/// `patience`.
void add_stacks(HostSeen& seen, Seconds patience);

/// Each process's stack, as a tool that finds it prints it; "" where none does in time.
std::vector<std::string> stacks_of(const std::vector<int>& pids, Seconds patience);

/// "<host>.json"; of a job on several nodes, of which two may be on one host, "<host>.<node>.json".
std::string dump_name(const HostSeen& seen, int num_nodes);

/// Writes the file, whole or not at all; its path. std::runtime_error that says why it cannot.
std::string write_dump(const HostSeen& seen, const std::string& folder, int num_nodes);

/// The dumps of a folder, by node. What is none is named in `problems`, not an error.
std::vector<HostSeen> read_dumps(const std::string& folder, std::vector<std::string>& problems);

}  // namespace serried::launch
