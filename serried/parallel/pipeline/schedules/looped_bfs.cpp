// LoopedBFS: every stage of a rank takes all micro-batches before the next stage does (Lamy-Poirier, 2022).
#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows looped_bfs_rows(const TableOptions& sizes) {
  const auto [p, v, m] = sizes;
  PipelineRows rows;
  for (int64_t r = 0; r < p; ++r) {
    RowBuilder row(looped_stages(sizes, r), m);
    for (int64_t i = 0; i < v * m; ++i) row.forward(i / m);
    // Micro-batches in order here too, so that gradients are added as a loop over micro-batches adds them.
    for (int64_t i = 0; i < v * m; ++i) row.backward(v - 1 - i / m);
    rows.push_back(row.take());
  }
  return rows;
}

}  // namespace serried::detail
