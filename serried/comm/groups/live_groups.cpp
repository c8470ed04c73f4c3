// The groups that the rank threads of one run have made.
#include "serried/comm/groups/live_groups.h"

#include <algorithm>

namespace serried::detail {
namespace {

thread_local std::shared_ptr<LiveGroups> current;

void abort_quietly(const Group& group) {
  try {
    group->abort();
  } catch (const std::exception&) {
    // A backend that cannot abort leaves its peers to the timeout; the failure that led here is what counts.
  }
}

}  // namespace

void LiveGroups::add(const Group& group) {
  if (outer_) outer_->add(group);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!aborted_) {
    std::erase_if(groups_, [](const auto& held) { return held.expired(); });
    groups_.emplace_back(group);
    return;
  }
  lock.unlock();
  abort_quietly(group);
}

void LiveGroups::abort() {
  std::vector<Group> alive;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    for (const auto& held : groups_) {
      if (Group group = held.lock()) alive.push_back(std::move(group));
    }
    groups_.clear();
  }
  for (const Group& group : alive) abort_quietly(group);
}

bool LiveGroups::is_aborted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return aborted_;
}

bool is_run_aborted() {
  return current && current->is_aborted();
}

std::shared_ptr<LiveGroups> live_groups_of_thread() {
  return current;
}

LiveGroupsGuard::LiveGroupsGuard(std::shared_ptr<LiveGroups> groups)
    : previous_(std::exchange(current, std::move(groups))) {}

LiveGroupsGuard::~LiveGroupsGuard() {
  current = std::move(previous_);
}

void note_group(const Group& group) {
  if (current && group) current->add(group);
}

}  // namespace serried::detail
