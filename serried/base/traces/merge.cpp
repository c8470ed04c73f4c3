// First reads what there is, then writes it with the clocks put right.
#include "serried/base/traces/merge.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>

#include "serried/base/text.h"
#include "serried/base/traces/half_file.h"
#include "serried/base/traces/sources.h"

namespace serried::trace {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOneJob = "merge the files of one job: remove what another one has left";

std::string milliseconds_text(double microseconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f ms", microseconds / 1e3);
  return text.data();
}

// Clocks count nanoseconds; what a double has beyond them is noise, and long.
double rounded(double microseconds) {
  return std::round(microseconds * 1e3) / 1e3;
}

constexpr double kMostMeasuredNs = 1e18;  // what is more is a mistake of whoever wrote the file

/// Processes that share the steady clock.
struct Clock {
  std::string host;
  int64_t offset_ns = 0;  // to the time since 1970, as the first file has it
  double shift_us = 0;    // by which that is wrong
  bool is_measured = false;
  double measured_ns = 0;  // from this clock to node 0's, as launchers have measured it
  double error_ns = 0;
  std::set<int> ranks = {};
};

class Merger {
 public:
  explicit Merger(const MergeOptions& options) : options_(options), sources_(find_sources(options.inputs)) {
    for (const Source& source : sources_) bytes_to_read_ += 2 * source.bytes;
  }

  MergeReport run() {
    for (size_t i = 0; i < sources_.size(); ++i) read(int(i));
    check_sources();
    set_measured_clocks();
    const std::vector<Collective> collectives = match(timeline_);
    align_clocks(collectives);
    write(collectives);
    report_.summary = summarise(timeline_, collectives);
    return std::move(report_);
  }

 private:
  void read(int index);
  void take_head(int index, const TraceHead& head);
  void take_event(int index, const json& event);
  void take_measurement(int index, const json& event);
  void check_sources();
  void leave_out(const Source& source);
  void remark_missing_ranks();
  void set_measured_clocks();
  void align_clocks(const std::vector<Collective>& collectives);
  void align(Clock& clock, const Clock& right, const std::set<int>& fixed, const std::vector<Collective>& collectives);
  void write(const std::vector<Collective>& collectives);
  void write_to(const std::string& path, const std::vector<Collective>& collectives);
  void write_events(std::ostream& out);
  void write_arrows(std::ostream& out, const std::vector<Collective>& collectives) const;
  double offset_of(const Source& source) const;
  std::function<void(uint64_t)> progress(const Source& source) const;

  const MergeOptions& options_;
  MergeReport report_;
  std::vector<Source> sources_;
  std::vector<Clock> clocks_;
  std::map<std::string, int> clock_numbers_;
  Timeline timeline_;
  uint64_t bytes_to_read_ = 0;  // of two passes
  uint64_t bytes_read_ = 0;
  double first_us_ = std::numeric_limits<double>::infinity();
};

std::function<void(uint64_t)> Merger::progress(const Source& source) const {
  if (!options_.on_progress) return nullptr;
  return [this, &source](uint64_t bytes) {
    options_.on_progress(fs::path(source.path).filename(), double(bytes_read_ + bytes) / double(bytes_to_read_));
  };
}

void Merger::read(int index) {
  Source& source = sources_[index];
  const TraceReader reader{.on_head = [&](const TraceHead& head) { take_head(index, head); },
                           .on_event = [&](const json& event) { take_event(index, event); },
                           .on_progress = progress(source)};
  source.end = read_trace(source.path, reader);
  bytes_read_ += source.bytes;
}

void Merger::take_head(int index, const TraceHead& head) {
  Source& source = sources_[index];
  source.head = head;
  if (head.is_merged) return;
  const auto other = std::find_if(sources_.begin(), sources_.begin() + index,
                                  [](const Source& s) { return s.takes_part() && !s.head.job.empty(); });
  if (other != sources_.begin() + index && !head.job.empty() && head.job != other->head.job) {
    throw TraceError(in_quotes(other->path) + " and " + in_quotes(source.path) + " are of different jobs", kOneJob);
  }
  const std::string clock = head.clock.empty() ? source.path : head.clock;
  const auto [found, is_new] = clock_numbers_.try_emplace(clock, int(clocks_.size()));
  if (is_new) clocks_.push_back({.host = head.host, .offset_ns = head.offset_ns});
  source.clock = found->second;
}

// Offsets are as long as the time since 1970, of which too little would be left in a double: relative ones are short.
double Merger::offset_of(const Source& source) const {
  const Clock& clock = clocks_[source.clock];
  return double(clock.offset_ns - clocks_.front().offset_ns) / 1e3 + clock.shift_us;
}

void Merger::take_event(int index, const json& event) {
  const Source& source = sources_[index];
  if (source.head.is_merged) return;
  if (text_in(event, "name") == "serried_clock") take_measurement(index, event);
  const int rank = timeline_.add(event, index, offset_of(source));
  if (rank < 0 || timeline_.ranks[rank].file == index) return;
  throw TraceError("rank " + std::to_string(rank) + " is in both " +
                       in_quotes(sources_[timeline_.ranks[rank].file].path) + " and " + in_quotes(source.path),
                   kOneJob);
}

// Of several ranks of a host, and several times, the best.
void Merger::take_measurement(int index, const json& event) {
  const auto args = event.find("args");
  if (args == event.end() || !args->is_object() || !args->contains("offset_ns")) return;
  const double offset = number_in(*args, "offset_ns", 0);
  const double error = number_in(*args, "error_ns", -1);
  Clock& clock = clocks_[sources_[index].clock];
  const bool makes_sense = std::abs(offset) < kMostMeasuredNs && error >= 0 && error < kMostMeasuredNs;
  if (!makes_sense || (clock.is_measured && clock.error_ns <= error)) return;
  clock.is_measured = true;
  clock.measured_ns = offset;
  clock.error_ns = error;
}

void Merger::leave_out(const Source& source) {
  if (!source.is_named) {
    // What an earlier merge has made of this folder is nothing to speak of.
    if (source.head.is_merged) return;
    report_.remarks.push_back(in_quotes(source.path) + " is left out: it is not a trace that serried wrote");
    return;
  }
  if (source.head.is_merged) {
    throw TraceError(in_quotes(source.path) + " is merged already", "pass the files that it was made of");
  }
  throw TraceError(in_quotes(source.path) + " is not a trace that serried wrote",
                   "pass files that SERRIED_TRACE=<folder> or trace::write made");
}

void Merger::check_sources() {
  int num_taken = 0;
  for (const Source& source : sources_) {
    if (!source.takes_part()) {
      leave_out(source);
      continue;
    }
    ++num_taken;
    std::error_code error;
    if (fs::equivalent(source.path, options_.output, error)) {
      throw TraceError("the output " + in_quotes(options_.output) + " is one of the inputs", "choose another output");
    }
    if (source.end.is_whole) continue;
    report_.remarks.push_back(in_quotes(source.path) +
                              " breaks off, as that of a rank that was killed or still runs: its first " +
                              std::to_string(source.end.num_events) + " events are taken");
  }
  if (num_taken > 0) return remark_missing_ranks();
  const std::string where = detail::printable(options_.inputs.empty() ? "" : options_.inputs.front());
  throw TraceError("there are no traces in \"" + where + "\"",
                   "run the job with SERRIED_TRACE=" + where + ", then merge");
}

void Merger::remark_missing_ranks() {
  int world_size = 0;
  for (const Source& source : sources_) world_size = std::max(world_size, source.head.world_size);
  std::string missing;
  int num_missing = 0;
  constexpr int kMostNamed = 16;
  for (int rank = 0; rank < world_size; ++rank) {
    if (timeline_.ranks.contains(rank) || ++num_missing > kMostNamed) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (num_missing == 0) return;
  if (num_missing > kMostNamed) missing += " and " + std::to_string(num_missing - kMostNamed) + " more";
  report_.remarks.push_back((num_missing == 1 ? "rank " : "ranks ") + missing + " of " + std::to_string(world_size) +
                            (num_missing == 1 ? " has" : " have") +
                            " no trace here: killed before there was one, or it is elsewhere");
}

// Better than the times of day, which hosts have from elsewhere.
void Merger::set_measured_clocks() {
  const Clock& right = clocks_.front();
  for (size_t number = 1; number < clocks_.size() && right.is_measured; ++number) {
    Clock& clock = clocks_[number];
    if (!clock.is_measured) continue;
    const double offset_ns = clock.measured_ns - right.measured_ns;
    clock.shift_us = (offset_ns - (double(clock.offset_ns) - double(right.offset_ns))) / 1e3;
    std::map<int, double> shifts;
    for (const auto& [rank, times] : timeline_.ranks) {
      if (sources_[times.file].clock == int(number)) shifts[rank] = clock.shift_us;
    }
    timeline_.shift(shifts);
    report_.remarks.push_back("the clock of " + detail::printable(clock.host) + " is " +
                              milliseconds_text(offset_ns / 1e3) + " behind that of " + detail::printable(right.host) +
                              ", +- " + milliseconds_text((clock.error_ns + right.error_ns) / 1e3) +
                              ", as their launchers have measured");
  }
}

void Merger::align_clocks(const std::vector<Collective>& collectives) {
  for (const auto& [rank, times] : timeline_.ranks) clocks_[sources_[times.file].clock].ranks.insert(rank);
  const Clock* right = nullptr;
  std::set<int> fixed;
  for (Clock& clock : clocks_) {
    if (clock.ranks.empty()) continue;
    if (right == nullptr) {
      right = &clock;
    } else {
      align(clock, *right, fixed, collectives);
    }
    fixed.insert(clock.ranks.begin(), clock.ranks.end());
  }
}

void Merger::align(Clock& clock, const Clock& right, const std::set<int>& fixed,
                   const std::vector<Collective>& collectives) {
  const ClockShift found = find_shift(timeline_, collectives, fixed, clock.ranks);
  if (found.num_collectives == 0 || found.shift_us == 0) return;
  clock.shift_us += found.shift_us;
  std::map<int, double> shifts;
  for (const int rank : clock.ranks) shifts[rank] = found.shift_us;
  timeline_.shift(shifts);
  report_.remarks.push_back(
      "the clock of " + detail::printable(clock.host) + " is moved by " + milliseconds_text(found.shift_us) +
      " to that of " + detail::printable(right.host) + ", +- " + milliseconds_text(found.doubt_us) + ", by " +
      std::to_string(found.num_collectives) + " collectives" + (found.contradicts ? "; the clocks drift" : ""));
}

[[noreturn]] void raise_unwritable(const std::string& path) {
  const std::string why = errno != 0 ? std::strerror(errno) : "there is no room for it";
  throw TraceError("cannot write " + in_quotes(path) + ": " + why,
                   "pass a path in a folder that exists and is writable");
}

// A merge that fails halfway leaves no half file: it is written beside its place. Not so a pipe or a device.
void Merger::write(const std::vector<Collective>& collectives) {
  std::error_code error;
  const bool is_special = fs::exists(options_.output, error) && !fs::is_regular_file(options_.output, error);
  if (is_special) return write_to(options_.output, collectives);
  const HalfFile half(options_.output);
  write_to(half.path(), collectives);
  if (std::rename(half.path().c_str(), options_.output.c_str()) != 0) raise_unwritable(options_.output);
}

void Merger::write_to(const std::string& path, const std::vector<Collective>& collectives) {
  errno = 0;
  std::ofstream out(path);
  if (!out) raise_unwritable(options_.output);
  out << R"({"displayTimeUnit":"ms","otherData":{"merged":)" << timeline_.ranks.size() << R"(},"traceEvents":[)";
  write_events(out);
  write_arrows(out, collectives);
  out << "\n]}\n" << std::flush;
  if (!out) raise_unwritable(options_.output);
}

void Merger::write_events(std::ostream& out) {
  bool is_first = true;
  const auto add = [&](const json& event) { out << (std::exchange(is_first, false) ? "\n" : ",\n") << text_of(event); };
  for (const auto& [rank, times] : timeline_.ranks) {
    first_us_ = std::min(first_us_, times.whole.begin);
    if (times.is_named) continue;
    const std::string& host = sources_[times.file].head.host;
    const std::string name = "rank " + std::to_string(rank) + (host.empty() ? "" : " (" + host + ")");
    add({{"name", "process_name"}, {"ph", "M"}, {"pid", rank}, {"args", {{"name", name}}}});
  }
  if (std::isinf(first_us_)) first_us_ = 0;
  for (const Source& source : sources_) {
    if (!source.takes_part()) continue;
    const double offset = offset_of(source) - first_us_;  // small numbers: viewers have few digits
    const auto copy = [&](json& event) {
      if (event.contains("ts")) event["ts"] = rounded(number_in(event, "ts", 0) + offset);
      add(event);
    };
    read_trace(source.path, {.on_head = [](const TraceHead&) {}, .on_event = copy, .on_progress = progress(source)});
    bytes_read_ += source.bytes;
  }
}

// From the arrival of the last rank into the middle of what is left to each of the others.
void Merger::write_arrows(std::ostream& out, const std::vector<Collective>& collectives) const {
  int64_t id = 0;
  for (const Collective& collective : collectives) {
    const Call& last = collective.last();
    const auto arrow = [&](const char* kind, const Call& call, double time) {
      json event{{"name", timeline_.names[last.name]},
                 {"cat", "collective"},
                 {"ph", kind},
                 {"id", id},
                 {"pid", call.rank},
                 {"tid", call.tid},
                 {"ts", rounded(time - first_us_)}};
      if (kind[0] == 'f') event["bp"] = "e";
      out << ",\n" << text_of(event);
    };
    for (const Call& call : collective.calls) {
      if (call.rank == last.rank) continue;
      ++id;
      arrow("s", last, last.time.begin);
      arrow("f", call, (std::min(last.time.begin, call.time.end) + call.time.end) / 2);
    }
  }
}

}  // namespace

MergeReport merge_traces(const MergeOptions& options) {
  return Merger(options).run();
}

}  // namespace serried::trace
