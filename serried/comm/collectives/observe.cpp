// The list of a thread's observers.
#include "serried/comm/collectives/observe.h"

namespace serried::observe {
namespace {

constinit thread_local Observer* newest = nullptr;

}  // namespace

Observer::Observer(std::function<void(const Call&)> callback) : callback_(std::move(callback)), outer_(newest) {
  newest = this;
}

Observer::~Observer() {
  // Not always the newest: two that are members of values may end in any order.
  Observer** place = &newest;
  while (*place != nullptr && *place != this) place = &(*place)->outer_;
  if (*place == this) *place = outer_;
}

void started(const char* name, int64_t bytes, const Group& group) {
  if (newest == nullptr) [[likely]]
    return;
  if (group->getSize() == 1) return;
  for (Observer* each = newest; each != nullptr; each = each->outer_) each->callback_({name, bytes, group});
}

}  // namespace serried::observe
