// What ranks say of themselves in memory that other processes of their user may read, laid out for readers that have
// no LibTorch: `serried top`. Ranks keep the file open while the group lives; readers find it in /proc/<pid>/fd.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace serried::watch_page {

// Names of the files, as /proc/<pid>/fd shows them behind "/memfd:".
inline constexpr const char* kSegmentName = "serried";        // of a group on shm or threads
inline constexpr const char* kPageName = "serried-watch";     // of a group on gloo
inline constexpr const char* kMeetingPrefix = "serried-in-";  // held during the call it names: "serried-in-new_group"

/// Where the file begins. All but the name and `failed` is written before anybody else sees the file.
struct Header {
  static constexpr uint64_t kMagic = 0x3148435441575253;  // "SRWATCH1"
  static constexpr uint32_t kVersion = 2;                 // counts changes of anything in this file

  uint64_t magic;
  uint32_t version;
  uint32_t is_shared;  // 0: only the rank that made it writes to it
  int32_t world_size;
  uint32_t rank_stride;  // from one rank's RankPage to the next
  uint64_t ranks;        // offsets from here on: of rank 0's RankPage
  uint64_t calls;        // of the ring of calls, in a RankPage
  uint32_t call_stride;  // call of sequence s: number s % num_calls
  uint32_t num_calls;
  uint64_t phases;   // of rank 0's phase, a word that only grows; phase_stride 0: there are none
  uint64_t failure;  // of the text, ended by a zero
  uint32_t failure_room;
  uint32_t phase_stride;
  char group[96];                // its name, ended by a zero
  std::atomic<uint32_t> failed;  // the text is there

  /// Cuts what is too long.
  void set_group(std::string_view name) {
    const size_t length = std::min(name.size(), sizeof(group) - 1);
    std::copy_n(name.begin(), length, group);
    group[length] = '\0';
  }
};

/// Where what a group keeps of a rank begins. Written by that rank alone.
struct RankPage {
  std::atomic<int32_t> pid;           // 0: it has not come
  std::atomic<int32_t> rank;          // in the job
  std::atomic<uint32_t> left;         // it has closed the group
  std::atomic<uint32_t> waits_for;    // while it sleeps: 0 for peers of a collective, else peer_word()
  std::atomic<uint64_t> newest;       // sequence of the newest call
  std::atomic<uint64_t> waits_in;     // sequence of the call in which it sleeps
  std::atomic<uint64_t> waits_since;  // CLOCK_MONOTONIC in ns; 0: it does not sleep
  std::atomic<uint64_t> waits_phase;  // which peers have to reach
  std::atomic<uint64_t> num_steps;    // backward passes that DistributedDataParallel has averaged over this group

  /// A send to, or a receive from, `peer`; -1: anybody.
  static constexpr uint32_t peer_word(bool sends, int peer) { return uint32_t(peer + 2) << 1 | uint32_t(sends); }
};

/// One call, as watch::Record has it; watch.h says what the numbers mean.
struct Call {
  static constexpr int kMaxDims = 5;

  uint64_t sequence = 0;
  uint8_t kind = 0;
  int8_t dtype = -1;
  uint8_t reduce_op = 0;
  uint8_t num_dims = 0;
  int32_t root = -1;
  int64_t num_elements = 0;
  int64_t sizes[kMaxDims] = {};
  char part_of[24] = {};
  uint32_t sizes_of_all = 0;
  uint8_t captured = 0;
  uint8_t same_size = 0;
  uint16_t unused = 0;
};

}  // namespace serried::watch_page
