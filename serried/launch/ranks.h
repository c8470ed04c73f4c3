// The ranks of this node during one attempt: started, watched, ended.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/launch/cause.h"
#include "serried/launch/guard.h"
#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/output.h"
#include "serried/launch/plan.h"

namespace serried::launch {

class LocalRank;

/// What outlives an attempt.
struct Surroundings {
  const Options& options;
  std::string program;  // its path
  Screen& screen;
  Guard& guard;
};

class LocalRanks {
 public:
  /// Starts them all; if one cannot start, ends the others and throws LaunchError.
  LocalRanks(const Surroundings& surroundings, const Assignment& assignment);

  /// Kills what still runs, the ranks' own children included, and passes the rest of the output on.
  ~LocalRanks();

  /// Adds the ranks' output pipes.
  void watch(std::vector<Watch>& watches);

  /// Takes note of ranks that have ended; call it on SIGCHLD.
  void look();

  /// The first rank that ended with anything but 0, noted by `look`. Unset while there is none.
  const std::optional<Cause>& failure() const { return failure_; }

  bool all_ended() const;

  /// Whether `pid` is one of the ranks.
  bool has(pid_t pid) const;

  /// Sends `signal` to every rank that runs and to its children.
  void send(int signal);

 private:
  std::vector<std::unique_ptr<LocalRank>> ranks_;
  Screen& screen_;
  std::optional<Cause> failure_;
};

}  // namespace serried::launch
