// One event in memory at a time, by the callbacks of the JSON parser.
#include "serried/base/traces/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "serried/base/traces/error.h"
#include "serried/base/traces/sources.h"

namespace serried::trace {
namespace {

using nlohmann::json;
using ParseEvent = json::parse_event_t;

// Files may say anything: what is no time and no number of ranks counts as missing.
constexpr int64_t kMostNanoseconds = int64_t{1} << 61;
constexpr int64_t kMostRanks = 1 << 20;

int64_t bounded(int64_t value, int64_t most) {
  return value >= 0 && value < most ? value : 0;
}

TraceHead head_of(const json& other) {
  TraceHead head;
  head.job = text_in(other, "job");
  head.host = text_in(other, "host");
  head.clock = text_in(other, "clock");
  head.offset_ns = bounded(integer_in(other, "realtime_ns", 0), kMostNanoseconds) -
                   bounded(integer_in(other, "monotonic_ns", 0), kMostNanoseconds);
  head.world_size = int(bounded(integer_in(other, "world_size", 0), kMostRanks));
  head.is_merged = other.contains("merged");
  return head;
}

/// Takes events out of the parser's hands as soon as they are whole.
class EventTaker {
 public:
  EventTaker(std::istream& file, const TraceReader& reader) : file_(file), reader_(reader) {}

  /// Whether the parser keeps the value.
  bool operator()(int depth, ParseEvent what, json& value) {
    constexpr int kDeepest = 32;  // of a file that means well; what is deeper would end its reader's stack
    if (depth > kDeepest) return false;
    if (depth == 1 && what == ParseEvent::key) key_ = value.get<std::string>();
    if (depth == 1 && what == ParseEvent::object_end && key_ == "otherData") take_head(value);
    if (depth != 2 || key_ != "traceEvents") return true;
    if (what == ParseEvent::object_end) take_event(value);
    return what == ParseEvent::object_start;  // what is no object is no event
  }

  const TraceEnd& end() const { return end_; }

 private:
  void take_head(const json& other) {
    if (!other.contains("monotonic_ns") && !other.contains("merged")) return;
    end_.is_trace = true;
    reader_.on_head(head_of(other));
  }

  void take_event(json& event) {
    constexpr uint64_t kEventsPerReport = 4096;
    if (!end_.is_trace) return;  // somebody else's
    if (++end_.num_events % kEventsPerReport == 0 && reader_.on_progress) {
      reader_.on_progress(uint64_t(std::max<int64_t>(0, file_.tellg())));
    }
    reader_.on_event(event);
  }

  std::istream& file_;
  const TraceReader& reader_;
  TraceEnd end_;
  std::string key_;
};

}  // namespace

TraceEnd read_trace(const std::string& path, const TraceReader& reader) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw TraceError("cannot read " + in_quotes(path) + ": " + std::strerror(errno), "pass files that you may read");
  EventTaker taker(file, reader);
  const json rest = json::parse(
      file, [&](int depth, ParseEvent what, json& value) { return taker(depth, what, value); },
      /*allow_exceptions=*/false);
  TraceEnd end = taker.end();
  end.is_whole = !rest.is_discarded();
  return end;
}

double number_in(const json& object, const char* key, double fallback) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() && found->is_number() ? found->get<double>() : fallback;
}

int64_t integer_in(const json& object, const char* key, int64_t fallback) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : fallback;
}

std::string text_in(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

std::string text_of(const json& event) {
  return event.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace serried::trace
