// 1F1B: a rank runs ahead by as many forwards as there are ranks after it, then each backward frees one (Narayanan et
// al., 2019).
#include <algorithm>

#include "serried/parallel/pipeline/schedules/row_builder.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried::detail {

PipelineRows one_f_one_b_rows(const TableOptions& sizes) {
  const int64_t m = sizes.microbatches;
  PipelineRows rows;
  for (int64_t r = 0; r < sizes.ranks; ++r) {
    const int64_t ahead = std::min(sizes.ranks - 1 - r, m);
    rows.push_back(RowBuilder({r}, m).repeat(ahead, "F0").repeat(m - ahead, "F0 B0").repeat(ahead, "B0").take());
  }
  return rows;
}

}  // namespace serried::detail
