// Slices kept per thread until they are written.
#include "serried/base/trace.h"

#include <pthread.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/trace_file.h"
#include "serried/base/trace_slices.h"
#include "serried/base/traces/merge.h"

namespace serried::trace {

namespace detail {
std::atomic<bool> recording{false};
}

namespace {

// One thread's slices. The lock is only ever contended by whoever writes them.
struct Buffer {
  std::mutex mutex;
  std::vector<Slice> slices;
  int thread = 0;
  std::string name;
};

// A program that records for days and never writes must not eat the machine: some 300 MB a thread.
constexpr size_t kMaxSlices = 1U << 20;

struct Buffers {
  std::mutex mutex;
  std::vector<std::shared_ptr<Buffer>> list;
};

Buffers*& buffers() {
  static auto* all = new Buffers();  // never destroyed: spans may end in static destructors
  return all;
}

std::shared_ptr<Buffer>& this_thread_buffer() {
  thread_local std::shared_ptr<Buffer> mine;
  return mine;
}

// A forked child has the locks of its parent's threads in any state, and the parent's slices: it begins anew.
void begin_anew_in_child() {
  detail::recording = false;
  buffers() = new Buffers();
  this_thread_buffer().reset();
}

std::string this_thread_name() {
  std::array<char, 32> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  return name.data();
}

Buffer& buffer() {
  std::shared_ptr<Buffer>& mine = this_thread_buffer();
  if (mine) return *mine;
  static const int registered = ::pthread_atfork(nullptr, nullptr, begin_anew_in_child);
  static_cast<void>(registered);
  mine = std::make_shared<Buffer>();
  mine->name = this_thread_name();
  const std::lock_guard<std::mutex> lock(buffers()->mutex);
  mine->thread = int(buffers()->list.size());
  buffers()->list.push_back(mine);
  return *mine;
}

constinit thread_local const Details* newest_details = nullptr;

}  // namespace

void start() {
  detail::recording.store(true, std::memory_order_relaxed);
}

void stop() {
  detail::recording.store(false, std::memory_order_relaxed);
}

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void add(Slice slice) {
  if (slice.rank < 0) slice.rank = rank_label().rank;
  Buffer& mine = buffer();
  const std::lock_guard<std::mutex> lock(mine.mutex);
  if (mine.slices.size() >= kMaxSlices) {
    log::warn_once("the trace is full; later spans are left out");
    return;
  }
  mine.slices.push_back(std::move(slice));
}

std::vector<TakenSlices> take_slices() {
  std::vector<TakenSlices> taken;
  const std::lock_guard<std::mutex> lock(buffers()->mutex);
  for (const auto& each : buffers()->list) {
    const std::lock_guard<std::mutex> buffer_lock(each->mutex);
    if (!each->slices.empty()) taken.push_back({each->thread, each->name, std::exchange(each->slices, {})});
  }
  return taken;
}

void Span::begin(int64_t bytes) {
  if (bytes >= 0) notes_.emplace_back("bytes", bytes);
  begin_ns_ = now_ns();
}

void Span::note(const char* key, int64_t value) {
  if (name_ != nullptr) notes_.emplace_back(key, value);
}

void Span::note(const char* key, std::string value) {
  if (name_ != nullptr) notes_.emplace_back(key, std::move(value));
}

void Span::end() {
  add({.name = name_, .category = category_, .begin_ns = begin_ns_, .end_ns = now_ns(), .notes = std::move(notes_)});
}

Details::Details(std::initializer_list<std::pair<const char*, int64_t>> notes) : is_on_(enabled()) {
  if (!is_on_) return;
  for (const auto& [key, value] : notes) notes_.emplace_back(key, value);
  outer_ = std::exchange(newest_details, this);
}

Details::~Details() {
  if (is_on_) newest_details = outer_;
}

std::vector<Note> Details::now() {
  return newest_details == nullptr ? std::vector<Note>() : newest_details->notes_;
}

void write(const std::string& path) {
  TraceFile file(path);
  file.append(take_slices());
  file.finish();
}

void merge(const std::vector<std::string>& inputs, const std::string& output) {
  try {
    merge_traces({.inputs = inputs, .output = output});
  } catch (const TraceError& error) {
    raise<c10::ValueError>({"trace", error.what(), error.fix()});
  }
}

}  // namespace serried::trace
