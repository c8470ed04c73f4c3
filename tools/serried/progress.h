// A line on stderr that says how far a long command has come.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace serried::tools {

/// "merging traces 3/12 (25 %), 00:04, about 00:12 left"; without what is not known: `total` 0, or nothing done yet.
std::string progress_text(std::string_view what, int64_t done, int64_t total, std::chrono::duration<double> elapsed);

/// While it lives, one line on a terminal that is redrawn in place ten times a second and gone at the end; elsewhere
/// nothing, or, where it is forced, a whole line every two seconds. What ends within `patience` draws nothing. Never
/// writes to stdout, which may be a pipe that wants the results alone: end it before you print.
///     Progress progress("planning", meshes.size(), Progress::Mode::automatic);
///     for (const auto& mesh : meshes) { progress.at(i, mesh.name); ... }
class Progress {
 public:
  enum class Mode { automatic, always, never };

  /// What `--progress` takes: auto, always or never; nothing for other words.
  static std::optional<Mode> mode_of(std::string_view word);

  /// `total` 0: not known.
  Progress(std::string what, int64_t total, Mode mode, int fd = STDERR_FILENO,
           std::chrono::milliseconds patience = std::chrono::milliseconds(500));
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` are done, and `item` comes next. Costs nothing to speak of: call it as often as you like.
  void at(int64_t done, std::string_view item = {});

 private:
  using Clock = std::chrono::steady_clock;

  void draw() const;
  void write(const std::string& text) const;
  void keep_drawing(const std::stop_token& stop);

  const std::string what_;
  const int64_t total_;
  const int fd_;
  const std::chrono::milliseconds patience_;
  const bool is_terminal_;
  const Clock::time_point begin_ = Clock::now();
  std::mutex mutex_;  // guards the two below
  int64_t done_ = 0;
  std::string item_;
  std::condition_variable_any stopped_;
  std::jthread drawer_;  // none where nothing is drawn
};

}  // namespace serried::tools
