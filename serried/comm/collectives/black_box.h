// Each call of this process as an entry of its black box, which others read when the process is stuck, stopped or dead.
#pragma once

#include <cstdint>
#include <string>

#include "serried/base/black_box_page.h"
#include "serried/comm/collectives/watch.h"

namespace serried::black_box {

namespace detail {
extern std::atomic<bool> recording;
}

/// Whether calls are recorded: always, but for benchmarks.
inline bool enabled() {
  return detail::recording.load(std::memory_order_relaxed);
}
void set_enabled(bool enabled);

/// One call on its way: a place in the ring, by value. Does nothing where there is none. Any thread may go on with it.
class CallLog {
 public:
  CallLog() = default;

  /// Its turn has come, as the collective `sequence` of its group; `at_once`: as soon as it was asked for.
  void begin(uint64_t sequence, bool at_once = false) const {
    if (entry_ != nullptr) write_begin(sequence, at_once);
  }
  /// The first time counts.
  void end(bool failed) const {
    if (entry_ != nullptr) write_end(failed);
  }

  /// This thread waits, respectively waits no more, for the peer of a send or receive; nothing for other calls.
  void begin_wait() const {
    if (entry_ != nullptr && is_peer_call_) write_wait(true);
  }
  void end_wait() const {
    if (entry_ != nullptr && is_peer_call_) write_wait(false);
  }

 private:
  friend class GroupLog;
  void write_begin(uint64_t sequence, bool at_once) const;
  void write_end(bool failed) const;
  void write_wait(bool waits) const;
  bool is_mine() const;        // the ring may have come round
  bool group_is_mine() const;  // the slot may be another group's

  Entry* entry_ = nullptr;
  GroupPage* group_ = nullptr;
  uint64_t head_ = 0;
  uint64_t issued_ns_ = 0;
  bool is_peer_call_ = false;
};

/// One group of this process, from when it has a name.
class GroupLog {
 public:
  GroupLog() = default;
  GroupLog(const GroupLog&) = delete;
  GroupLog& operator=(const GroupLog&) = delete;

  /// Takes a slot for it. Nothing is recorded where there is no memory for a box, or too many groups are open.
  void open(const std::string& name, int rank, int world_size);
  /// It calls no more.
  void close();

  /// `record` has just been asked for. What is recorded of it costs no system call.
  CallLog issue(const watch::Record& record) const;

 private:
  File* file_ = nullptr;
  GroupPage* page_ = nullptr;
  uint64_t id_ = 0;
};

/// The memory of this process: the one it has inherited from its launcher, else one of its own. Null where the system
/// gives none. Made by the first who asks; stays till the end.
File* file();

}  // namespace serried::black_box
