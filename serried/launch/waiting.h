// Ranks that wait for one another for long: who has not come, said in lines while nothing has failed.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "serried/launch/options.h"
#include "serried/launch/seen.h"

namespace serried::launch {

/// Some ranks of a group that wait in one call.
struct Stall {
  std::string what;  // the same as long as it is the same stall: "group dp: #183 all_reduce f32[512] sum"
  std::string
      text;  // "group dp: rank 3 (h1) has not come to #183 all_reduce f32[512] sum; 7 ranks wait since 5.0 s; ..."
  double seconds = 0;
};

/// What has lasted for `slow_after`, of the calls that `hosts` show as open. Ranks that no host shows are ranks of
/// which nothing is known.
std::vector<Stall> find_stalls(const std::vector<HostSeen>& hosts, Seconds slow_after);

/// When to say what: a stall once it is found, then ever more seldom, and when it is over.
class StallLines {
 public:
  /// What there is to say now, without "[run]" and end of line.
  std::vector<std::string> update(const std::vector<Stall>& stalls);

  /// The ranks have ended: nothing is over, and nothing goes on.
  void forget() { told_.clear(); }
  bool empty() const { return told_.empty(); }

 private:
  struct Told {
    double seconds = 0;  // how long it had lasted when it was last seen
    double next_seconds = 0;
  };
  std::map<std::string, Told> told_;
};

}  // namespace serried::launch
