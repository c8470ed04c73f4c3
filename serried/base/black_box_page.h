// The black box: the newest calls of one process, in memory that outlives it in the hands of its launcher. Laid out for
// readers that have no LibTorch, and that trust none of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "serried/base/watch_page.h"

namespace serried::black_box {

// The file's name, as /proc/<pid>/fd shows it behind "/memfd:".
inline constexpr const char* kFileName = "serried-box";

// Where a launcher puts the number of the file that a rank inherits.
inline constexpr const char* kVariable = "SERRIED_BLACK_BOX_FD";

using Word = std::atomic<uint64_t>;

inline constexpr uint32_t kNumEntries = 4096;
inline constexpr uint32_t kNumGroups = 256;  // that are open at once; of more, calls are only counted
inline constexpr int kCallWords = sizeof(watch_page::Call) / sizeof(uint64_t);
static_assert(sizeof(watch_page::Call) == kCallWords * sizeof(uint64_t));

/// Cuts what is too long.
template <size_t room>
void set_text(char (&to)[room], std::string_view text) {
  const size_t length = std::min(text.size(), room - 1);
  std::copy_n(text.begin(), length, to);
  std::fill(to + length, to + room, '\0');
}

/// Where the file begins. Who makes it writes the first part, before anybody else sees it.
struct Header {
  static constexpr uint64_t kMagic = 0x31584f4244525253;  // "SRRDBOX1"
  static constexpr uint32_t kVersion = 1;                 // counts changes of anything in this file, or of Call

  uint64_t magic;
  uint32_t version;
  int32_t rank;  // in the job; -1: not known
  char run_id[64];

  // By the process that writes into it.
  std::atomic<int32_t> pid;          // 0: none has come
  std::atomic<uint32_t> num_slots;   // of groups that have been used so far, up to kNumGroups
  std::atomic<uint64_t> num_groups;  // that were made so far: the newest has this id
  std::atomic<uint64_t> num_calls;   // that were made so far: number n is entry n % kNumEntries
  std::atomic<uint64_t> num_lost;    // calls of groups for which there was no slot
};

/// A group as this process has it, and its newest collective, which the ring may have forgotten. Times are
/// CLOCK_MONOTONIC in ns.
struct GroupPage {
  Word id;  // from 1 on, in the order in which they were made; 0: nothing yet, or being written
  int32_t rank;
  int32_t world_size;
  int32_t job_rank;              // of the one who is `rank`; -1: not known
  std::atomic<uint32_t> closed;  // it calls no more
  char name[96];
  Word num_issued;  // collectives, as all that is no send or receive
  Word num_ended;
  Word ended_sequence;                   // the highest of a call that has ended
  Word ended_ns;                         // when the last one ended; at first, when the group was made
  std::atomic<uint32_t> num_peer_waits;  // threads that wait in a send or a receive
  std::atomic<uint32_t> unused;          // so that all bytes mean something
  Word peer_wait_ns;                     // since when the last of them does
  Word newest;                           // sequence of the newest collective that has begun; 0 while it is rewritten
  Word newest_issued_ns, newest_begun_ns;
  Word newest_call[kCallWords];
};

/// One call. Its first word of `call`, the sequence, is 0 until it has begun; that of a send or receive stays so.
struct alignas(64) Entry {
  Word head;       // id of the group << 32 | low half of the number of the call + 1; 0 while it is rewritten
  Word issued_ns;  // the caller asked for it
  Word begun_ns;   // the rank had its turn, or began to wait for a peer; 0: not yet
  Word ended_ns;   // highest bit: it failed; 0: not yet
  Word call[kCallWords];
};
static_assert(sizeof(Entry) == 128);

inline constexpr uint64_t kFailedBit = uint64_t(1) << 63;

struct File {
  alignas(128) Header header;
  alignas(128) GroupPage groups[kNumGroups];
  alignas(128) Entry entries[kNumEntries];
};

/// What the head of an entry is.
constexpr uint64_t head_of(uint64_t group, uint64_t number) {
  return group << 32 | uint32_t(number + 1);
}

}  // namespace serried::black_box
