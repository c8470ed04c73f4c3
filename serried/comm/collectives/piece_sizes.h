// Before pieces of different sizes travel, ranks tell each other what they hold: one small all_gather of int64.
#pragma once

#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace serried::detail {

/// What every rank holds along `dim`. ValueError on every rank, naming two of them and their tensors,
/// where dtypes or other dims differ. A meta tensor communicates nothing: every rank is taken to hold as much.
std::vector<int64_t> agree_gather_sizes(const at::Tensor& x, const Group& group, int64_t dim);

/// What comes from each rank along `concat_dim` when rank p sends split_sizes[q] along `split_dim` to rank q.
std::vector<int64_t> agree_exchange_sizes(const at::Tensor& x, const Group& group, int64_t split_dim,
                                          int64_t concat_dim, at::IntArrayRef split_sizes);

}  // namespace serried::detail
