// From slices to events, and the rows that viewers show them in.
#include "serried/base/trace_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/traces/reader.h"

namespace serried::trace {
namespace {

using nlohmann::json;

// Threads come first, in the order of their first slice, then the tracks of groups.
constexpr int kFirstTrack = 1000;

int64_t realtime_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

// Equal for processes that share the steady clock: containers may have one of their own.
std::string clock_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  const ssize_t length = ::readlink("/proc/self/ns/time", space.data(), space.size());
  return length <= 0 ? boot : boot.append(" ").append(space.data(), size_t(length));
}

std::atomic<ClockSource> clock_source{nullptr};

// Empty where no launcher has named it.
std::string job_name() {
  for (const char* name : {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID"}) {
    if (const auto job = env::maybe_text(name)) return *job + "/" + env::text("TORCHELASTIC_RESTART_COUNT");
  }
  return "";
}

json head() {
  return {{"serried", 1},
          {"job", job_name()},
          {"world_size", rank_label().world_size},
          {"host", host_name()},
          {"clock", clock_name()},
          {"realtime_ns", realtime_ns()},
          {"monotonic_ns", now_ns()}};
}

json about_row(const char* what, int rank, int tid, json args) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", tid}, {"args", std::move(args)}};
}

}  // namespace

void set_clock_source(ClockSource source) {
  clock_source = source;
}

int rank_or_zero() {
  return std::max(rank_label().rank, 0);
}

TraceFile::TraceFile(const std::string& path) : path_(path), file_(path) {
  if (!file_) {
    raise<c10::ValueError>({"trace", c10::str("cannot write \"", path, "\": ", std::strerror(errno)),
                            "pass a path in a folder that exists and is writable"});
  }
  file_ << R"({"displayTimeUnit":"ms","otherData":)" << text_of(head()) << R"(,"traceEvents":[)";
  name_rank(rank_or_zero());
}

void TraceFile::add(const std::string& line) {
  file_ << (std::exchange(is_first_, false) ? "\n" : ",\n") << line;
}

void TraceFile::name_rank(int rank) {
  if (!num_rows_.try_emplace(rank, 0).second) return;
  const std::string name = c10::str("rank ", rank, " (", host_name(), ", pid ", ::getpid(), ")");
  add(text_of(about_row("process_name", rank, 0, {{"name", name}})));
  add(text_of(about_row("process_sort_index", rank, 0, {{"sort_index", rank}})));
}

TraceFile::Row& TraceFile::row(const RowKey& key, const std::string& name, int sort_index) {
  const auto [found, is_new] = rows_.try_emplace(key);
  if (!is_new) return found->second;
  const int rank = std::get<0>(key);
  const int tid = ++num_rows_[rank];
  found->second.tid = tid;
  add(text_of(about_row("thread_name", rank, tid, {{"name", name}})));
  add(text_of(about_row("thread_sort_index", rank, tid, {{"sort_index", sort_index + tid}})));
  return found->second;
}

// Collectives of one group may be under way at the same time, and viewers want the slices of a row apart or nested: a
// track has as many lanes as it needs. Slices come in the order of their ends.
TraceFile::Row& TraceFile::row_of(int rank, const TakenSlices& from, const Slice& slice) {
  if (slice.track.empty()) return row({rank, c10::str("thread ", from.thread), 0}, from.thread_name, 0);
  for (int lane = 0;; ++lane) {
    const std::string name = lane == 0 ? slice.track : c10::str(slice.track, " (", lane + 1, ")");
    Row& found = row({rank, slice.track, lane}, name, kFirstTrack);
    if (found.busy_until_ns > slice.begin_ns) continue;
    found.busy_until_ns = slice.end_ns;
    return found;
  }
}

void TraceFile::add_slice(const TakenSlices& from, const Slice& slice) {
  const int rank = slice.rank < 0 ? rank_or_zero() : slice.rank;  // the rendezvous itself, before there was a rank
  name_rank(rank);
  json event{{"name", slice.name},
             {"cat", slice.category},
             {"ph", "X"},
             {"pid", rank},
             {"tid", row_of(rank, from, slice).tid},
             {"ts", double(slice.begin_ns) / 1e3},
             {"dur", double(slice.end_ns - slice.begin_ns) / 1e3}};
  for (const Note& note : slice.notes) event["args"][note.key] = note.is_text ? json(note.text) : json(note.number);
  add(text_of(event));
}

void TraceFile::append(const std::vector<TakenSlices>& taken) {
  // Several threads may have ended collectives of one group.
  std::vector<std::pair<const TakenSlices*, const Slice*>> by_end;
  for (const TakenSlices& each : taken) {
    for (const Slice& slice : each.slices) by_end.emplace_back(&each, &slice);
  }
  std::stable_sort(by_end.begin(), by_end.end(),
                   [](const auto& a, const auto& b) { return a.second->end_ns < b.second->end_ns; });
  for (const auto& [from, slice] : by_end) add_slice(*from, *slice);
  add_clock();
  file_.flush();
}

// The launcher's estimate gets better while the program runs: the last counts.
void TraceFile::add_clock() {
  const ClockSource source = clock_source;
  const std::optional<HostClock> clock = source == nullptr ? std::nullopt : source();
  if (!clock || clock == told_clock_) return;
  told_clock_ = clock;
  add(text_of(
      about_row("serried_clock", rank_or_zero(), 0, {{"offset_ns", clock->offset_ns}, {"error_ns", clock->error_ns}})));
}

void TraceFile::finish() {
  add_clock();
  file_ << "\n]}\n" << std::flush;
  if (file_) return;
  raise<c10::ValueError>({"trace", c10::str("cannot write all of \"", path_, "\": ", std::strerror(errno)),
                          "make room on its disk, or trace fewer steps: trace::start() and trace::stop()"});
}

}  // namespace serried::trace
