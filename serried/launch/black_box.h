// The memory in which a rank keeps its newest calls, from the launcher's side: it makes the memory and reads it, also
// when the rank is dead, stopped or stuck. Nothing that is in there is trusted.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serried/base/black_box_page.h"
#include "serried/launch/fd.h"
#include "serried/launch/seen.h"

namespace serried::launch {

class BlackBox {
 public:
  /// For a rank of the job to inherit. Without memory where the system gives none: the rank then makes its own.
  static BlackBox make(int rank, const std::string& job);

  /// What a process has open at `path`, in /proc. Without memory, and a problem(), if that is no black box of `owner`.
  static BlackBox open(const std::string& path, uid_t owner);

  /// -1 where there is none.
  int fd() const { return fd_.get(); }
  const black_box::File* file() const { return file_.get(); }
  const std::string& problem() const { return problem_; }

  /// As the launcher wrote it.
  int rank() const;
  std::string job() const;
  /// Who writes into it; 0: nobody yet.
  pid_t pid() const;

  /// Whether a call may have lasted for so long by `now_ns`: looks at a few words of each group.
  bool may_wait(int64_t now_ns, int64_t longer_than_ns) const;

  /// The groups of the rank. `longest_wait_ns`: fills GroupSeen::open with calls that have lasted for so long.
  std::vector<GroupSeen> groups(int64_t now_ns, int64_t longest_wait_ns) const;

  /// The calls that the ring holds, oldest first, but for those that are being written.
  std::vector<CallSeen> calls() const;
  uint64_t num_calls() const;

 private:
  void map();

  Fd fd_;
  std::shared_ptr<const black_box::File> file_;
  std::string problem_;
};

/// CLOCK_MONOTONIC.
int64_t monotonic_ns();

/// The state of a process: 'R', 'S', 'T'; 'Z' where it has ended.
char process_state(pid_t pid);

}  // namespace serried::launch
