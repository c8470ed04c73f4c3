// The ranks of this node during one attempt: started, watched, ended.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/launch/black_box.h"
#include "serried/launch/cause.h"
#include "serried/launch/guard.h"
#include "serried/launch/lines.h"
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
  Lines& lines;
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

  /// The rank to blame: the first that ended with anything but 0, noted by `look`. One whose last words are about
  /// another's failure is blamed only if none other ends within a moment. Unset while there is none.
  const std::optional<Cause>& failure() const { return failure_; }

  /// Ends that moment when it is over; call it at `deadline`.
  void decide();
  Time deadline() const;

  bool all_ended() const;

  /// Processes of the ranks by rank; 0: it has ended.
  std::map<int, pid_t> pids() const;

  /// What they do in their groups, by rank, and what the kernel says of them; see BlackBox::groups.
  std::vector<RankSeen> seen(int64_t now_ns, int64_t longest_wait_ns) const;
  std::map<int, const BlackBox*> boxes() const;

  /// How far this host's clock is from node 0's, for traces and dumps.
  void tell_clock(const std::optional<ClockEstimate>& clock);

  /// Whether `pid` is one of the ranks.
  bool has(pid_t pid) const;

  /// Sends `signal` to every rank that runs and to its children.
  void send(int signal);

  /// --keep-going: another table of ranks. Tells those that are there their places, and starts the fresh ones;
  /// LaunchError if one cannot start.
  void change(const Surroundings& surroundings, const Assignment& assignment);
  /// --keep-going: tells them that the ranks of `generation` are no longer all there.
  void say_over(int generation, const std::string& why);

  /// --keep-going: a rank that has ended, by the number of its seat, with 0 or by a failure. Each is told once, and is
  /// gone then.
  struct Ended {
    int seat;
    std::optional<Cause> failure;
  };
  std::vector<Ended> take_ended();
  /// --keep-going: the seats whose ranks have said that they use Elastic.
  std::vector<int> take_elastic();

 private:
  std::string who_ended_well() const;
  void start(const Surroundings& surroundings, const Assignment& assignment, int local_rank);

  std::vector<std::unique_ptr<LocalRank>> ranks_;
  Screen& screen_;
  Lines& lines_;
  bool keep_going_;
  std::optional<Cause> suspect_;  // of those that have failed so far
  Time decide_at_ = kNever;
  std::optional<Cause> failure_;
};

}  // namespace serried::launch
