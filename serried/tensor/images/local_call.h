// What handlers of image ops share: reading arguments per dim of space, and running the op on plain tensors.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "serried/spmd/windows.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/images/image_cut.h"

namespace serried::detail {

/// The 2 of "aten::avg_pool2d_backward".
inline size_t space_ndim_of(std::string_view op) {
  for (size_t i = 0; i + 1 < op.size(); ++i) {
    if (op[i] >= '1' && op[i] <= '3' && op[i + 1] == 'd') return size_t(op[i] - '0');
  }
  return 0;
}

/// One number per dim of space; a single one counts for all. None for another length.
std::optional<Sizes> per_dim(const OpCall& call, std::string_view argument, size_t ndim);

/// The last `ndim` of `sizes`.
inline Sizes last_sizes(c10::IntArrayRef sizes, size_t ndim) {
  return Sizes(sizes.end() - int64_t(ndim), sizes.end());
}

/// Where the rule decides instead: integers and bools are rare enough.
inline bool is_real(const at::Tensor& t) {
  return c10::isFloatingType(t.scalar_type());
}

/// Arguments that the local call has instead of those of `call`.
using Replaced = std::vector<std::pair<const char*, c10::IValue>>;

/// The op on plain tensors; results in order.
torch::jit::Stack run_local(const c10::OperatorHandle& op, const OpCall& call, const Replaced& replaced);

/// Whether two tensors have the same sizes but for space.
bool same_but_space(const at::Tensor& a, const at::Tensor& b, size_t ndim);

}  // namespace serried::detail
