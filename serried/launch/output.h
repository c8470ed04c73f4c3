// The ranks' output: whole lines with a prefix on the screen, raw bytes in log files, the last lines of stderr kept.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "serried/launch/fd.h"
#include "serried/launch/loop.h"

namespace serried::launch {

enum class Stream { out, err };

/// Cuts a stream of bytes into lines.
class LineSplitter {
 public:
  using Emit = std::function<void(std::string_view line)>;  // without the newline

  /// Emits every line that `bytes` completes. A line above 1 MiB is cut, so memory stays bounded.
  void feed(std::string_view bytes, const Emit& emit);

  /// Emits the last line if it has no newline.
  void finish(const Emit& emit);

 private:
  std::string partial_;
};

/// The launcher's own stdout and stderr. Text is queued in one order for both, so that lines never mix even when
/// both are one terminal, and written only when it cannot block, so that Ctrl-C works while a reader is stuck.
class Screen {
 public:
  Screen(int out_fd, int err_fd);

  /// Queues whole lines.
  void write(Stream stream, const std::string& text);

  /// "[rank 2] ", coloured where the stream is a terminal and NO_COLOR is not set.
  std::string prefix(Stream stream, int rank) const;

  /// Enough is queued: ranks should wait.
  bool empty() const { return queue_.empty(); }
  bool full() const { return queued_bytes_ > (1 << 20); }
  bool reader_gone() const { return reader_gone_; }
  void watch(std::vector<Watch>& watches);

  /// Writes what is queued, at most until `deadline`.
  void flush(Time deadline);

 private:
  void write_some();

  std::array<int, 2> fds_;
  std::array<bool, 2> coloured_;
  std::deque<std::pair<Stream, std::string>> queue_;
  size_t written_of_first_ = 0;
  size_t queued_bytes_ = 0;
  bool reader_gone_ = false;
};

struct RankStreamOptions {
  std::string log_path = {};
  bool shown = true;
};

/// One stream of one rank.
class RankStream {
 public:
  /// LaunchError if the log cannot be written.
  RankStream(Screen& screen, Stream stream, int rank, const RankStreamOptions& options = {});

  /// Passes on what `fd` has now. False at its end.
  bool pump(int fd);

  /// Passes the last, unfinished line on.
  void finish();

  /// The rank has another number from the next line on.
  void rename(int rank) { prefix_ = screen_.prefix(stream_, rank); }

  /// The last lines, oldest first.
  const std::deque<std::string>& tail() const { return tail_; }

  static constexpr size_t kTailLines = 20;

 private:
  void add_line(std::string_view line);
  void log(std::string_view bytes);

  Screen& screen_;
  Stream stream_;
  std::string prefix_;
  bool shown_;
  LineSplitter lines_;
  std::string batch_;
  std::deque<std::string> tail_;
  Fd log_;
};

}  // namespace serried::launch
