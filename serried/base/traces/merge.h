// Joins the files that the ranks of a job have written into one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "serried/base/traces/error.h"
#include "serried/base/traces/summary.h"

namespace serried::trace {

struct MergeOptions {
  std::vector<std::string> inputs;  // files; of a folder, all in it that are traces of single ranks
  std::string output;
  std::function<void(const std::string& what, double share)> on_progress = nullptr;  // share: 0 to 1
};

struct MergeReport {
  Summary summary;
  std::vector<std::string> remarks;  // what the reader should know: ranks that are missing, files that break off
};

/// Writes `output`: one process row per rank, on one clock, and an arrow from the rank that came last in a collective
/// to each of the others. Reads the files twice, so that memory goes with the number of collectives, not with the size
/// of the files. TraceError where there is nothing to merge or the files do not belong together; then `output` stays as
/// it was.
MergeReport merge_traces(const MergeOptions& options);

}  // namespace serried::trace
