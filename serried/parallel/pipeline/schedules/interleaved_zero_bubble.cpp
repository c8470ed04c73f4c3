// Interleaved with split backwards: weights' gradients lag behind, and fill what would be bubbles (ZB-H1 of Qi et al.,
// 2023, on several stages per rank).
#include <algorithm>

#include "serried/parallel/pipeline/schedules/rounds.h"
#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows interleaved_zero_bubble_rows(const TableOptions& sizes) {
  const RoundOrder order = round_order(sizes);
  const size_t total = order.forwards.size();
  PipelineRows rows;
  for (int64_t r = 0; r < sizes.ranks; ++r) {
    const size_t until_last_stage = size_t((sizes.stages_per_rank - 1) * order.largest_round);
    // Input gradients take half of a backward, hence one forward for each rank after this where Interleaved has two.
    const size_t ahead = std::min(until_last_stage + size_t(sizes.ranks - 1 - r), total);
    RowBuilder row(looped_stages(sizes, r), sizes.microbatches);
    for (size_t i = 0; i < ahead; ++i) row.forward(order.forwards[i]);
    for (size_t i = 0; i < total; ++i) {
      if (ahead + i < total) row.forward(order.forwards[ahead + i]);
      row.input(order.backwards[i]);
      // A later rank is earlier with its first backward, and owes as many weights' gradients for the end.
      if (i >= size_t(r)) row.weight();
    }
    while (row.owes_weights()) row.weight();
    rows.push_back(row.take());
  }
  return rows;
}

}  // namespace serried::detail
