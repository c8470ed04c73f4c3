// Who gives its state, and who takes it: decided alike by all ranks of a meeting from what each has said.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace serried::detail {

enum class Condition : int {
  fresh,  // has done no step with others: its state counts where nobody has another
  whole,  // as it was at the end of a step
  torn,   // between two steps, or partly overwritten
};

struct Told {
  int64_t step = 0;
  Condition condition = Condition::fresh;
  uint64_t digest = 0;  // of all but buffers
  uint64_t buffers_digest = 0;
};

struct Choice {
  int64_t step = 0;
  bool is_start = false;                   // nobody has done a step: the first rank's state is as good as any
  std::vector<int> sources = {};           // ranks with the state that counts, the first with the buffers that do
  std::vector<int> receivers = {};         // of all that is no buffer
  std::vector<int> buffer_receivers = {};  // sources may be among these
};

/// Whole states of the highest step; where there is none, that of the first fresh rank. No sources where all that ever
/// stepped are torn.
Choice choose(const std::vector<Told>& ranks);

}  // namespace serried::detail
