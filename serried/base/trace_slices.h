// What the library records for the trace, beyond spans: slices that begin and end on different threads.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "serried/base/trace.h"

namespace serried::trace {

/// A piece of time in the trace. `category` is a string literal.
struct Slice {
  std::string name;
  const char* category = "serried";
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int rank = -1;           // -1: the process's
  std::string track = {};  // empty: that of the thread which adds it
  std::vector<Note> notes = {};
};

/// The clock of slices: the steady one, in nanoseconds.
int64_t now_ns();

/// Takes a slice whether recording is on or not: it may have begun before `stop`.
void add(Slice slice);

/// While it lives, the collectives that this thread starts say more in the trace.
///     const trace::Details details({{"bucket", 3}, {"parameters", 12}});
class Details {
 public:
  explicit Details(std::initializer_list<std::pair<const char*, int64_t>> notes);
  ~Details();
  Details(const Details&) = delete;
  Details& operator=(const Details&) = delete;

  /// Those of this thread; the innermost count.
  static std::vector<Note> now();

 private:
  std::vector<Note> notes_;
  const Details* outer_ = nullptr;
  bool is_on_ = false;
};

/// What one thread has added since the last time.
struct TakenSlices {
  int thread = 0;  // counted in this process
  std::string thread_name;
  std::vector<Slice> slices;
};
std::vector<TakenSlices> take_slices();

}  // namespace serried::trace
