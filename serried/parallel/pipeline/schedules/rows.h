// The closed forms: the rows of each schedule's table.
#pragma once

#include <vector>

#include "serried/parallel/pipeline/table.h"

namespace serried::detail {

using PipelineRows = std::vector<PipelineTable::Row>;

// Sizes are checked already.
PipelineRows gpipe_rows(const TableOptions& sizes);
PipelineRows one_f_one_b_rows(const TableOptions& sizes);
PipelineRows interleaved_rows(const TableOptions& sizes);
PipelineRows looped_bfs_rows(const TableOptions& sizes);
PipelineRows interleaved_zero_bubble_rows(const TableOptions& sizes);
PipelineRows zbv_rows(const TableOptions& sizes);
PipelineRows dual_pipe_v_rows(const TableOptions& sizes);

}  // namespace serried::detail
