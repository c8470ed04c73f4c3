// Keeps the newest one as handles and the one before as a copy.
#include "serried/elastic/spread_versions.h"

#include <utility>

#include "serried/tensor/parts.h"

namespace serried::detail {

void SpreadVersions::begin_step(int64_t step, const checkpoint::Contents& contents) {
  current_ = Version{step, spread_state(contents)};
  buffers_.clear();
  for (const SpreadPart& part : current_->state.parts) {
    if (part.is_buffer) buffers_.push_back(part_of(part.tensor).detach().clone());
  }
}

void SpreadVersions::passed() {
  older_.clear();
  older_.push_back({current_->step, copy_of(current_->state)});
  size_t next = 0;  // forward has changed those of modules
  for (SpreadPart& part : older_.back().state.parts) {
    if (part.is_buffer) part.tensor = std::move(buffers_.at(next++));
  }
  current_.reset();
}

void SpreadVersions::collect(int64_t step, const checkpoint::Contents& contents) {
  if (!current_) begin_step(step, contents);
}

std::vector<const SpreadVersions::Version*> SpreadVersions::all() const {
  std::vector<const Version*> versions;
  if (current_) versions.push_back(&*current_);
  for (const Version& each : older_) versions.push_back(&each);
  return versions;
}

void SpreadVersions::settle_for(int64_t step) {
  if (current_ && current_->step != step) current_.reset();
  std::erase_if(older_, [&](const Version& each) { return each.step != step; });
}

void SpreadVersions::met(int64_t step, SpreadState state, std::vector<std::string> names) {
  if (current_) older_.insert(older_.begin(), *std::exchange(current_, {}));
  current_ = Version{step, std::move(state)};
  names_ = std::move(names);
}

}  // namespace serried::detail
