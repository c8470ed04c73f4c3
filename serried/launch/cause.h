// Why a job's ranks are being ended; travels between the launchers of a job.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

/// Of a leader that is no node.
inline constexpr int kNodeOfLeader = -1;

struct Cause {
  enum class Kind { rank_failed, interrupted, node_lost, launch_failed, changed };

  Kind kind = Kind::rank_failed;
  int node = 0;
  std::string host = {};  // changed: the hosts that want in
  int rank = -1;          // rank_failed: who
  int pid = 0;
  int exit_code = 0;                   // rank_failed without a signal, launch_failed
  int signal = 0;                      // rank_failed: what killed it, or 0; interrupted: what the launcher got
  std::vector<std::string> tail = {};  // rank_failed: its last lines of stderr
  std::string text = {};  // launch_failed: the error; rank_failed: what else may be the reason; node_lost: its symptom
  bool goes_on = false;   // without that node, or with those hosts
  std::string note = {};  // --keep-going: who goes on, or why nobody does
};

/// Whether the last words of a failed rank say that another one was first to fail.
bool only_suffers(const Cause& cause);

/// The report every node prints, in the house format. `world_size` 0: no rank had started.
std::string describe(const Cause& cause, int world_size, int num_nodes);

/// What the launchers exit with: the culprit's code, or 128 + signal.
int exit_code(const Cause& cause);

/// As fields of a message, and back. std::runtime_error if they make no sense.
std::vector<std::string> to_fields(const Cause& cause);
Cause cause_from_fields(const std::vector<std::string>& fields, size_t first);

}  // namespace serried::launch
