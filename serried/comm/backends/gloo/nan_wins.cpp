// Values and marks side by side: a mark is what MIN or MAX prefers, so one NaN marks its place on every rank.
#include "serried/comm/backends/gloo/nan_wins.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>

#include <limits>

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

}  // namespace

NanWins make_nan_win(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (op.op_ != RedOpType::MIN && op.op_ != RedOpType::MAX) return {tensors, {}};
  for (const at::Tensor& x : tensors) {
    if (!x.defined() || x.layout() != at::kStrided || !x.is_floating_point()) return {tensors, {}};
  }
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(with_marks(x, op.op_ == RedOpType::MAX ? 1 : -1));
  return {buffers, [tensors, buffers] {
            for (size_t i = 0; i < tensors.size(); ++i) take_back(tensors[i], buffers[i]);
          }};
}

}  // namespace serried::gloo
