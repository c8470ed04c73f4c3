// The moments that a rank can go back to with what is spread over ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "serried/elastic/choice.h"
#include "serried/elastic/spread_state.h"

namespace serried::detail {

/// What all ranks together have of a step is whole only if each of them can give its part of that very step. A rank
/// that is a step ahead, or was cut off while optimizers ran, gives the copy it took at commit(). What it had when
/// ranks met last is kept until a commit shows that nobody has to meet again from there.
class SpreadVersions {
 public:
  struct Version {
    int64_t step = 0;
    SpreadState state = {};
  };

  /// What `contents` have when a step begins: until commit() passes it is what they have.
  void begin_step(int64_t step, const checkpoint::Contents& contents);
  /// commit() has passed, and optimizers are about to change it.
  void passed();
  /// Ranks are about to meet, and `contents` are as they were at the end of a step.
  void collect(int64_t step, const checkpoint::Contents& contents);

  /// All of them: the newest first.
  std::vector<const Version*> all() const;

  /// Others than of `step` are of no use any more: what they are made of may be written.
  void settle_for(int64_t step);
  /// Ranks have met, and have this.
  void met(int64_t step, SpreadState state, std::vector<std::string> names);

  /// Of all tensors that any rank had when ranks met last.
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::optional<Version> current_;   // handles of what is trained; none while it is changed
  std::vector<at::Tensor> buffers_;  // copies of those in it, as they were when the step began
  std::vector<Version> older_;
  std::vector<std::string> names_;
};

}  // namespace serried::detail
