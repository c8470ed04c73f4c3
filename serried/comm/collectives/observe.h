// Who watches the collectives of a thread: each call is told once, before it communicates.
#pragma once

#include <cstdint>
#include <functional>

#include "serried/comm/groups/group.h"

namespace serried::observe {

/// One collective as this rank starts it.
struct Call {
  const char*
      name;       // all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv barrier
  int64_t bytes;  // of this rank's input; of the output where it has none, as in recv
  const Group& group;
};

/// Calls `callback` for every collective of collectives.h that this thread starts while alive, those of redistributions
/// and of backward included. Groups of one rank communicate nothing and are not told. Nests: all observers are told,
/// the newest first. Stays on the thread that made it.
class Observer {
 public:
  explicit Observer(std::function<void(const Call&)> callback);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

 private:
  friend void started(const char* name, int64_t bytes, const Group& group);
  std::function<void(const Call&)> callback_;
  Observer* outer_;
};

/// Tells this thread's observers; a test of one word where there is none.
void started(const char* name, int64_t bytes, const Group& group);

}  // namespace serried::observe
