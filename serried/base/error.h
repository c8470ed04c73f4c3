// Errors in one format: where, what with real values, fix, rank.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>

namespace serried {

/// The parts of a message, in the order a reader needs them.
struct ErrorText {
  std::string_view where;  // the call: "new_group", "all_reduce"
  std::string what;        // with the real values
  std::string fix;         // what the reader does next
};

/// The text of `error` as users see it:
///     [new_group] unknown backend "glo"; known: auto, fake, gloo
///       fix: pass one of the known names
///       at:  rank 3/8
/// The last line is left out where this thread has no rank yet.
std::string format_error(const ErrorText& error);

/// Throws `Exception`, one of c10's error types, with a formatted text and no backtrace.
///     raise<c10::ValueError>({"new_group", "world_size is 0", "pass 1 or more"});
template <class Exception>
[[noreturn]] void raise(const ErrorText& error) {
  throw Exception(format_error(error));
}

/// Which rank this thread speaks for in errors, logs and traces; rank -1: none yet.
struct RankLabel {
  int rank = -1;
  int world_size = 0;
};

/// This thread's label, or else the process's.
RankLabel rank_label();

/// Names the rank of the whole process. The first label stays: it is the world's, not a subgroup's.
void set_process_rank_label(RankLabel label);

/// Names the rank of this thread while alive: ranks may be threads of one process.
class ThreadRankLabel {
 public:
  explicit ThreadRankLabel(RankLabel label);
  ~ThreadRankLabel();
  ThreadRankLabel(const ThreadRankLabel&) = delete;
  ThreadRankLabel& operator=(const ThreadRankLabel&) = delete;

 private:
  RankLabel previous_;
};

}  // namespace serried
