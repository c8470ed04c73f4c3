// Spans kept per thread, and the Chrome trace files made of them.
#include "serried/base/trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <set>

#include <nlohmann/json.hpp>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/fork.h"
#include "serried/base/log.h"

namespace serried::trace {
namespace {

using nlohmann::json;

struct Event {
  const char* name;
  const char* category;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
  int rank;
};

// One thread's events. The lock is only ever contended by `write`.
struct Buffer {
  std::mutex mutex;
  std::vector<Event> events;
  int thread = 0;
};

// A run that is traced for days must not eat the machine: 200 MB a thread.
constexpr size_t kMaxEvents = 1U << 22;

std::atomic<bool> recording{false};

struct Buffers {
  std::mutex mutex;
  std::vector<std::shared_ptr<Buffer>> list;
};

Buffers& buffers() {
  static auto* all = new Buffers();  // never destroyed: spans may end in static destructors
  return *all;
}

Buffer& this_thread_buffer() {
  thread_local const std::shared_ptr<Buffer> mine = [] {
    auto buffer = std::make_shared<Buffer>();
    std::lock_guard<std::mutex> lock(buffers().mutex);
    buffer->thread = int(buffers().list.size());
    buffers().list.push_back(buffer);
    return buffer;
  }();
  return *mine;
}

int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t realtime_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

int rank_or_zero() {
  return std::max(rank_label().rank, 0);
}

json to_json(const Event& event, int thread) {
  json result{{"name", event.name},
              {"cat", event.category},
              {"ph", "X"},
              {"pid", event.rank},
              {"tid", thread},
              {"ts", double(event.begin_ns) / 1e3},
              {"dur", double(event.end_ns - event.begin_ns) / 1e3}};
  if (event.bytes >= 0) result["args"] = {{"bytes", event.bytes}};
  return result;
}

json process_name(int rank) {
  return {{"name", "process_name"}, {"ph", "M"}, {"pid", rank}, {"args", {{"name", c10::str("rank ", rank)}}}};
}

json take_events() {
  json events = json::array();
  std::set<int> ranks{rank_or_zero()};
  std::lock_guard<std::mutex> lock(buffers().mutex);
  for (const auto& buffer : buffers().list) {
    std::lock_guard<std::mutex> buffer_lock(buffer->mutex);
    for (Event& event : buffer->events) {
      if (event.rank < 0) event.rank = rank_or_zero();  // the rendezvous itself, before there was a rank
      ranks.insert(event.rank);
      events.push_back(to_json(event, buffer->thread));
    }
    buffer->events.clear();
  }
  for (int rank : ranks) events.push_back(process_name(rank));
  return events;
}

std::ofstream open_output(const std::string& path) {
  std::ofstream file(path);
  if (file) return file;
  raise<c10::ValueError>({"trace", c10::str("cannot write \"", path, "\": ", std::strerror(errno)),
                          "pass a path in a folder that exists and is writable"});
}

json read_input(const std::string& path) {
  std::ifstream file(path);
  json result = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (result.contains("traceEvents") && result.contains("otherData")) return result;
  raise<c10::ValueError>({"trace", c10::str("\"", path, "\" is not a trace that serried wrote"),
                          "pass files that SERRIED_TRACE=<folder> or trace::write made"});
}

// What turns a file's monotonic microseconds into microseconds since 1970.
double offset_us(const json& file) {
  const json& anchors = file["otherData"];
  return double(anchors.value("realtime_ns", int64_t{0}) - anchors.value("monotonic_ns", int64_t{0})) / 1e3;
}

const HomeProcess& home() {
  static const HomeProcess process;
  return process;
}

void write_at_exit() {
  if (!home().is_here()) return;  // the file is the parent's
  try {
    const std::filesystem::path folder = env::text("SERRIED_TRACE");
    std::filesystem::create_directories(folder);
    write(folder / c10::str("rank_", rank_or_zero(), ".json"));
  } catch (const std::exception& error) {
    log::warn_once(c10::str("the trace was not written: ", error.what()));
  }
}

[[maybe_unused]] const bool started_by_environment = [] {
  if (!env::maybe_text("SERRIED_TRACE")) return false;
  start();
  home();
  std::atexit(write_at_exit);
  return true;
}();

}  // namespace

bool enabled() {
  return recording.load(std::memory_order_relaxed);
}

void start() {
  recording.store(true, std::memory_order_relaxed);
}

void stop() {
  recording.store(false, std::memory_order_relaxed);
}

Span::Span(const char* name, const char* category, int64_t bytes)
    : name_(enabled() ? name : nullptr), category_(category), bytes_(bytes) {
  if (name_ != nullptr) begin_ns_ = monotonic_ns();
}

Span::~Span() {
  if (name_ == nullptr) return;
  const int64_t end_ns = monotonic_ns();
  Buffer& buffer = this_thread_buffer();
  std::lock_guard<std::mutex> lock(buffer.mutex);
  if (buffer.events.size() >= kMaxEvents) {
    log::warn_once("the trace is full; later spans are left out");
    return;
  }
  buffer.events.push_back({name_, category_, bytes_, begin_ns_, end_ns, rank_label().rank});
}

void write(const std::string& path) {
  std::ofstream file = open_output(path);
  json root;
  root["otherData"] = {{"realtime_ns", realtime_ns()}, {"monotonic_ns", monotonic_ns()}};
  root["traceEvents"] = take_events();
  file << root.dump() << '\n';
}

void merge(const std::vector<std::string>& inputs, const std::string& output) {
  json events = json::array();
  double first_us = std::numeric_limits<double>::infinity();
  for (const std::string& input : inputs) {
    json file = read_input(input);
    const double offset = offset_us(file);
    for (json& event : file["traceEvents"]) {
      if (event.contains("ts")) {
        event["ts"] = event["ts"].get<double>() + offset;
        first_us = std::min(first_us, event["ts"].get<double>());
      }
      events.push_back(std::move(event));
    }
  }
  // Small numbers: viewers read microseconds since 1970 with too few digits.
  for (json& event : events) {
    if (event.contains("ts")) event["ts"] = event["ts"].get<double>() - first_us;
  }
  open_output(output) << json{{"traceEvents", std::move(events)}}.dump() << '\n';
}

}  // namespace serried::trace
