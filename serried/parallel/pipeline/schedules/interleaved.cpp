// Interleaved 1F1B: several stages per rank, so that the pipeline fills and drains in shorter steps (Narayanan et al.,
// 2021).
#include <algorithm>

#include "serried/parallel/pipeline/schedules/rounds.h"
#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows interleaved_rows(const TableOptions& sizes) {
  const RoundOrder order = round_order(sizes);
  const size_t total = order.forwards.size();
  PipelineRows rows;
  for (int64_t r = 0; r < sizes.ranks; ++r) {
    // Until the last stage has the first micro-batch, and then a forward and a backward's way for each rank after this.
    const size_t until_last_stage = size_t((sizes.stages_per_rank - 1) * order.largest_round);
    const size_t ahead = std::min(until_last_stage + size_t(2 * (sizes.ranks - 1 - r)), total);
    RowBuilder row(looped_stages(sizes, r), sizes.microbatches);
    for (size_t i = 0; i < ahead; ++i) row.forward(order.forwards[i]);
    for (size_t i = 0; i < total; ++i) {
      if (ahead + i < total) row.forward(order.forwards[ahead + i]);
      row.backward(order.backwards[i]);
    }
    rows.push_back(row.take());
  }
  return rows;
}

}  // namespace serried::detail
