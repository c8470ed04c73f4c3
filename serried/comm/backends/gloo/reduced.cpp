// Values and marks side by side: a mark is what MIN or MAX prefers, so one NaN marks its place on every rank.
#include "serried/comm/backends/gloo/reduced.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <limits>

#include "serried/comm/collectives/reductions.h"

namespace serried::gloo {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

at::Tensor with_marks(const at::Tensor& x, double mark) {
  const at::Tensor flat = x.detach().reshape(-1);
  const at::Tensor is_nan = at::isnan(flat);
  return at::cat({flat.masked_fill(is_nan, 0), is_nan.to(flat.scalar_type()).mul_(mark)});
}

void take_back(const at::Tensor& x, const at::Tensor& buffer) {
  const at::Tensor values = buffer.narrow(0, 0, x.numel());
  const at::Tensor marks = buffer.narrow(0, x.numel(), x.numel());
  values.masked_fill_(marks.ne(0), std::numeric_limits<double>::quiet_NaN());
  x.detach().copy_(values.view(x.sizes()));
}

Reduced with_nans_first(const std::vector<at::Tensor>& tensors, RedOpType op) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(with_marks(x, op == RedOpType::MAX ? 1 : -1));
  return {buffers, op, [tensors, buffers] {
            for (size_t i = 0; i < tensors.size(); ++i) take_back(tensors[i], buffers[i]);
          }};
}

Reduced wide_average(const std::vector<at::Tensor>& tensors, int64_t count) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(detail::average_addends(x.detach(), count));
  return {buffers, RedOpType::SUM, [tensors, buffers, count] {
            for (size_t i = 0; i < tensors.size(); ++i) detail::write_average(tensors[i].detach(), buffers[i], count);
          }};
}

bool is_widened(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) || at::isIntegralType(dtype, /*includeBool=*/false);
}

bool all_of(const std::vector<at::Tensor>& tensors, bool (*is_kind)(at::ScalarType)) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& x) {
    return x.defined() && x.layout() == at::kStrided && is_kind(x.scalar_type());
  });
}

}  // namespace

Reduced make_reduced(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op, int64_t count) {
  const bool ordered = op.op_ == RedOpType::MIN || op.op_ == RedOpType::MAX;
  if (ordered && all_of(tensors, at::isFloatingType)) return with_nans_first(tensors, op.op_);
  if (op.op_ == RedOpType::AVG && all_of(tensors, is_widened)) return wide_average(tensors, count);
  return {tensors, op, {}};
}

}  // namespace serried::gloo
