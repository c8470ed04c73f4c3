// ZBV: split backwards on a V of two stages per rank, with as many in flight on every rank (Qi et al., 2024).
#include <algorithm>

#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows zbv_rows(const TableOptions& sizes) {
  const int64_t p = sizes.ranks;
  // The fewest with which a micro-batch is everywhere before the first comes back.
  const int64_t n = std::max(sizes.microbatches, 2 * p - 1);
  PipelineRows rows;
  for (int64_t r = 0; r < p; ++r) {
    RowBuilder row(v_stages(sizes, r), sizes.microbatches);
    row.repeat(2 * (p - r) - 1, "F0");  // down the V and back up to this rank
    row.repeat(r, "F1 F0");
    row.repeat(p - r, "F1 I1 W1");
    row.repeat(n - 2 * p + 1 + r, "F0 I0 W0 F1 I1 W1");
    row.repeat(p - 1 - r, "I0 W0 F1 I1 W1");
    row.repeat(r, "I0 I1");  // the way up goes first, its weights wait
    row.repeat(p - r, "I0 W0");
    row.repeat(r, "W1").repeat(r, "W0");
    rows.push_back(row.take());
  }
  return rows;
}

}  // namespace serried::detail
