// Checks of what users pass to collectives.
#pragma once

#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <string_view>
#include <vector>

namespace serried::detail {

/// Each raises a ValueError of the call `where`, unless it says otherwise.
void check_group(std::string_view where, const Group& group);
/// Neither may be null.
void check_call(std::string_view where, const at::Tensor& x, const Group& group);
/// Whether it is a DTensor or the like, which stands for the parts of all ranks.
bool is_dist_tensor(const at::Tensor& x);
/// NotImplementedError for one: no placement says what only one rank has.
void check_not_distributed(std::string_view where, const at::Tensor& x);
/// What the reduction means for the dtype is the same on every backend, and on a group of one, which reduces nothing.
void check_op(std::string_view where, const c10d::ReduceOp& op, const at::Tensor& x);
/// `dim` counted from the front; IndexError where `x` has no such dim.
int64_t checked_dim(std::string_view where, const char* name, const at::Tensor& x, int64_t dim);
void check_rank(std::string_view where, const char* name, int rank, const Group& group);
void check_peer(std::string_view where, int peer, int tag, const Group& group);
/// Contiguous tensors of one dtype, the output with so many elements.
void check_output(std::string_view where, const at::Tensor& output, const at::Tensor& x, int64_t num_elements);
/// Dim 0 can be cut into equal pieces.
void check_divisible(std::string_view where, const at::Tensor& x, const Group& group);
/// `sizes`, or Shard's cut where there are none.
std::vector<int64_t> checked_splits(const at::Tensor& x, int64_t dim, int num_ranks, std::vector<int64_t> sizes);
/// In milliseconds, as ops carry it.
std::optional<int64_t> checked_timeout(std::string_view where, std::optional<std::chrono::milliseconds> timeout);

}  // namespace serried::detail
