// Reads a file of the trace event by event, however large it is, and as far as it goes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <nlohmann/json.hpp>

namespace serried::trace {

/// What a file says about the process that wrote it. Empty and 0 where it does not.
struct TraceHead {
  std::string job;
  std::string host;
  std::string clock;      // equal for processes that share the steady clock
  int64_t offset_ns = 0;  // from that clock to the time since 1970
  int world_size = 0;
  bool is_merged = false;  // it has several files in it already
};

struct TraceEnd {
  bool is_trace = false;  // it has a head of ours
  bool is_whole = false;  // it has an end
  uint64_t num_events = 0;
};

struct TraceReader {
  std::function<void(const TraceHead&)> on_head;
  std::function<void(nlohmann::json& event)> on_event;
  std::function<void(uint64_t bytes)> on_progress = nullptr;  // so many bytes are read
};

/// Calls the reader for the head, then for each event in the order of the file. A file that breaks off, as that of a
/// killed rank, is read up to its last whole event. TraceError if it cannot be opened.
TraceEnd read_trace(const std::string& path, const TraceReader& reader);

/// The member `key` of an object as a number or text; `fallback` where it is missing or of another type.
double number_in(const nlohmann::json& object, const char* key, double fallback);
int64_t integer_in(const nlohmann::json& object, const char* key, int64_t fallback);
std::string text_in(const nlohmann::json& object, const char* key);

/// An event as it stands in a file. Names may hold anything; what is no UTF-8 is replaced.
std::string text_of(const nlohmann::json& event);

}  // namespace serried::trace
