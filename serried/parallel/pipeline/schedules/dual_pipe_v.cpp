// DualPipeV: a V where a forward of one stage and a whole backward of the other follow each other, for ranks that can
// overlap one's messages with the other's work (DeepSeek, 2025). Backwards are split only where it starts and ends.
#include <algorithm>

#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows dual_pipe_v_rows(const TableOptions& sizes) {
  const int64_t p = sizes.ranks;
  const int64_t n = std::max(sizes.microbatches, 2 * p);
  PipelineRows rows;
  for (int64_t r = 0; r < p; ++r) {
    const int64_t after = p - 1 - r;
    RowBuilder row(v_stages(sizes, r), sizes.microbatches);
    row.repeat(2 * after, "F0").repeat(r + 1, "F0 F1");
    row.repeat(after, "I1 W1 F1");
    row.repeat(n - 2 * p + 1 + r, "F0 B1 F1 B0");
    row.repeat(after, "B1 F1 B0");
    // r + 1 backwards of both stages in turn, of which the second half leaves its weights for the end.
    for (int64_t i = 0; i < 2 * (r + 1); ++i) {
      const int64_t stage = 1 - i % 2;
      if (i <= r)
        row.backward(stage);
      else
        row.input(stage);
    }
    row.repeat(after, "W I0").repeat(r + 1, "W");
    rows.push_back(row.take());
  }
  return rows;
}

}  // namespace serried::detail
