// A file of the trace: Chrome's JSON, one event a line, so that what is whole of a broken off file can be read.
#pragma once

#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "serried/base/trace_slices.h"

namespace serried::trace {

/// Of this process: its rank, or 0 where it has none.
int rank_or_zero();

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

  const std::string path_;
  std::ofstream file_;
  bool is_first_ = true;
  std::map<RowKey, Row> rows_;
  std::map<int, int> num_rows_;  // per rank
};

}  // namespace serried::trace
