// A file of the trace: Chrome's JSON, one event a line, so that what is whole of a broken off file can be read.
#pragma once

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "serried/base/trace_slices.h"

namespace serried::trace {

/// Of this process: its rank, or 0 where it has none.
int rank_or_zero();

/// How node 0's steady clock is found from that of this host.
struct HostClock {
  int64_t offset_ns = 0;  // to be added
  int64_t error_ns = 0;   // by which that may be wrong
  bool operator==(const HostClock&) const = default;
};

/// Who knows: asked whenever a file is written. Nothing where no launcher has said so.
using ClockSource = std::optional<HostClock> (*)();
void set_clock_source(ClockSource source);

class TraceFile {
 public:
  /// Begins the file. ValueError if it cannot be written.
  explicit TraceFile(const std::string& path);

  /// Adds slices, and hands them to the system: they survive the end of this process, however that comes.
  void append(const std::vector<TakenSlices>& taken);

  /// The file is whole. ValueError if the system did not take all of it.
  void finish();

 private:
  /// A row of the viewer below a rank's: a thread, or a lane of a track.
  struct Row {
    int tid = 0;
    int64_t busy_until_ns = 0;
  };
  using RowKey = std::tuple<int, std::string, int>;  // rank, thread or track, lane

  void add(const std::string& line);
  void add_slice(const TakenSlices& from, const Slice& slice);
  Row& row_of(int rank, const TakenSlices& from, const Slice& slice);
  Row& row(const RowKey& key, const std::string& name, int sort_index);
  void name_rank(int rank);
  void add_clock();

  const std::string path_;
  std::ofstream file_;
  bool is_first_ = true;
  std::optional<HostClock> told_clock_;
  std::map<RowKey, Row> rows_;
  std::map<int, int> num_rows_;  // per rank
};

}  // namespace serried::trace
