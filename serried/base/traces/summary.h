// What a merged trace says in a few lines: where the time of each rank went, and for whom the others waited.
#pragma once

#include <string>
#include <vector>

#include "serried/base/traces/collectives.h"

namespace serried::trace {

/// Times in microseconds.
struct RankSummary {
  int rank = 0;
  double whole = 0;
  double forward = 0;  // and the two below: without what was waiting
  double backward = 0;
  double optimizer = 0;
  double communication = 0;  // a collective was under way
  double waiting = 0;        // the program could do nothing else
  double hidden = 0;         // part of communication: beside other work
  int64_t bytes = 0;
};

/// Collectives of one name.
struct CollectiveSummary {
  std::string name;
  int64_t num_calls = 0;
  int64_t bytes = 0;   // of one rank, in all calls
  double time = 0;     // of the slowest rank, in all calls
  double waiting = 0;  // of all ranks, for the last
  int last_rank = -1;  // that came last most often
  int64_t num_last = 0;
};

/// A rank that others have waited for.
struct LateRank {
  int rank = -1;
  int64_t num_last = 0;
  double waited = 0;  // by all others
};

struct Summary {
  std::vector<RankSummary> ranks;
  std::vector<CollectiveSummary> collectives;  // those with the most waiting first
  int64_t num_collectives = 0;                 // with all their ranks
  LateRank latest;                             // rank -1: nobody was late
};

Summary summarise(const Timeline& timeline, const std::vector<Collective>& collectives);

/// For a terminal; the lists are cut to what fits on a screen.
std::string to_text(const Summary& summary);

}  // namespace serried::trace
