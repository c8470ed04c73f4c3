// GPipe: all forwards, then all backwards (Huang et al., 2018).
#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows gpipe_rows(const TableOptions& sizes) {
  const int64_t m = sizes.microbatches;
  PipelineRows rows;
  for (int64_t r = 0; r < sizes.ranks; ++r) {
    rows.push_back(RowBuilder({r}, m).repeat(m, "F0").repeat(m, "B0").take());
  }
  return rows;
}

}  // namespace serried::detail
