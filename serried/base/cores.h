// How many cores there are for this process.
#pragma once

#include <sched.h>

#include <thread>

namespace serried {

/// Those that taskset or a container leave to it, which std::thread::hardware_concurrency does not ask for.
inline int num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : int(std::thread::hardware_concurrency());
}

}  // namespace serried
