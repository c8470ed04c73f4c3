// Spans of time that end up in one Chrome/Perfetto trace of all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace serried::trace {

/// Whether spans are recorded: SERRIED_TRACE=<folder> at start, or `start`.
bool enabled();

/// Records spans from now on; they are kept in memory until `write`.
void start();
void stop();

/// One span from construction to destruction, on this thread and rank. Free when not enabled: one load.
/// `name` and `category` must outlive the trace: string literals.
///     trace::Span span("all_reduce", "comm", bytes);
class Span {
 public:
  explicit Span(const char* name, const char* category = "serried", int64_t bytes = -1);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const char* name_;  // null: tracing was off when the span began
  const char* category_;
  int64_t bytes_;
  int64_t begin_ns_ = 0;
};

/// Writes what this process has recorded as Chrome trace JSON; one process row per rank. ValueError if the path is not
/// writable.
void write(const std::string& path);

/// Joins the files that ranks have written into one, on a common clock (CLOCK_REALTIME anchors).
void merge(const std::vector<std::string>& inputs, const std::string& output);

}  // namespace serried::trace
