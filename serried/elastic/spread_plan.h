// Which state counts where ranks hold parts of it, and which bytes go from whom to whom: decided alike by all ranks of
// a meeting from what each has said.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serried/elastic/choice.h"
#include "serried/elastic/spread_state.h"

namespace serried::detail {

/// A moment that a rank could go back to.
struct SpreadOffer {
  int rank = 0;
  int64_t step = 0;
  SpreadState state = {};
};

struct SpreadTold {
  Condition condition = Condition::fresh;
  int64_t step = 0;
  std::vector<SpreadOffer> offers = {};
  std::vector<std::string> names = {};  // full names of all tensors that any rank had when ranks met last
};

struct SpreadChoice {
  int64_t step = 0;
  bool is_start = false;                 // nobody has done a step: of what several have the first one's counts
  std::vector<SpreadOffer> offers = {};  // with all that counts, in rank order
};

/// The highest step of which the ranks together have all: the parts of some may be at another one, which they could go
/// back from. Failure that names what nobody has where there is none.
SpreadChoice choose_spread(const std::vector<SpreadTold>& ranks);

/// What the offers make together: each tensor once, values of all. Failure where they contradict each other.
SpreadState joined(const std::vector<SpreadOffer>& offers);

/// Bytes in a rank's part.
struct CopiedRun {
  int64_t in_source = 0;
  int64_t in_target = 0;
  int64_t num_bytes = 0;
};

struct SpreadTransfer {
  int source = 0;
  size_t offer = 0;  // number among the offers
  size_t part = 0;   // number in it
  int target = 0;
  size_t place = 0;  // number among those of the rank
  std::vector<CopiedRun> runs = {};
};

/// Fills each place once: from the rank itself where it has the bytes, unless the first one's count, else from one
/// after the other of those that have them.
std::vector<SpreadTransfer> transfers_of(const SpreadChoice& choice,
                                         const std::vector<std::vector<SpreadPart>>& places_of_ranks);

}  // namespace serried::detail
