// Spans of time that end up in one Chrome/Perfetto trace of all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace serried::trace {

namespace detail {
extern std::atomic<bool> recording;
}

/// Whether spans are recorded: SERRIED_TRACE=<folder> at start, or `start`.
inline bool enabled() {
  return detail::recording.load(std::memory_order_relaxed);
}

/// Records spans from now on; they are kept in memory until `write`. With SERRIED_TRACE they go to its folder, twice a
/// second and at exit, so that a rank that is killed leaves what it has done.
void start();
void stop();

/// The phases of a training step: what viewers colour and filter by, and what `serried trace merge` adds up. Spans of
/// your own may have these or any other category.
inline constexpr const char* kForward = "forward";
inline constexpr const char* kBackward = "backward";
inline constexpr const char* kOptimizer = "optimizer";
inline constexpr const char* kCommunication = "communication";  // a collective, from its call until it is done
inline constexpr const char* kWait = "wait";                    // a thread that can do nothing else meanwhile
inline constexpr const char* kCopy = "copy";                    // into a bucket and out of it
inline constexpr const char* kSetup = "setup";                  // rendezvous and groups

/// What a span says beside its name; `key` is a string literal.
struct Note {
  Note(const char* key, int64_t value) : key(key), number(value) {}
  Note(const char* key, std::string value) : key(key), is_text(true), text(std::move(value)) {}

  const char* key;
  bool is_text = false;
  int64_t number = 0;
  std::string text;
};

/// One span from construction to destruction, on this thread and rank. Free when not enabled: one load.
/// `name` and `category` must outlive the trace: string literals.
///     trace::Span span("step", trace::kOptimizer);
class Span {
 public:
  explicit Span(const char* name, const char* category = "serried", int64_t bytes = -1)
      : name_(enabled() ? name : nullptr), category_(category) {
    if (name_ != nullptr) begin(bytes);
  }
  ~Span() {
    if (name_ != nullptr) end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// Says more in the trace: `span.note("layer", 3)`.
  void note(const char* key, int64_t value);
  void note(const char* key, std::string value);

 private:
  void begin(int64_t bytes);
  void end();

  const char* name_;  // null: tracing was off when the span began
  const char* category_;
  int64_t begin_ns_ = 0;
  std::vector<Note> notes_;
};

/// Writes what this process has recorded as Chrome trace JSON; one process row per rank. ValueError if the path is not
/// writable.
void write(const std::string& path);

/// Joins the files that ranks have written into one, as `serried trace merge` does: on a common clock, with arrows
/// between the parts of each collective. ValueError if one is no such file, or if two are of the same rank.
void merge(const std::vector<std::string>& inputs, const std::string& output);

}  // namespace serried::trace
