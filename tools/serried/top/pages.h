// What ranks say of themselves in the memory of their groups, read without taking part: by pread, so that nothing is
// mapped, locked or made to exist, and within bounds, whatever is written there.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "serried/base/watch_page.h"
#include "tools/serried/top/proc.h"

namespace serried::top {

/// A rank in the memory of one group.
struct PageRank {
  pid_t pid = 0;  // 0: it has not come
  int rank = 0;   // in the job; meaningful once it has come
  bool has_left = false;
  uint64_t newest = 0;
  uint64_t waits_in = 0;
  uint64_t waits_since = 0;
  uint32_t waits_for = 0;
  uint32_t waits_phase = 0;
  uint32_t phase = 0;
  uint64_t num_steps = 0;
  watch_page::Call call = {};        // the newest; kind 0 where it could not be read
  watch_page::Call waits_call = {};  // the one it waits in
};

/// The memory of one group.
struct Page {
  uint64_t file = 0;  // its number: the same for all who have it open
  std::string group;
  bool is_shared = true;
  bool has_phases = false;
  std::string failure;  // why the group has failed; "" while it has not
  std::vector<PageRank> ranks;
  std::string problem;  // why it cannot be read; nothing else counts then
};

/// What process `pid` has open as `fd`.
Page read_page(const Proc& proc, pid_t pid, int fd);

/// The same of a file that is open already and belongs to `owner`.
Page read_page(int file, uid_t owner);

}  // namespace serried::top
