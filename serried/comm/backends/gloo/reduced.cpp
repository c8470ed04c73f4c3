// Values and marks side by side: a mark is what MIN or MAX prefers, so one NaN marks its place on every rank.
#include "serried/comm/backends/gloo/reduced.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
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

Reduced with_nans_first(const std::vector<at::Tensor>& tensors, double mark) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(with_marks(x, mark));
  return {buffers, [tensors, buffers] {
            for (size_t i = 0; i < tensors.size(); ++i) take_back(tensors[i], buffers[i]);
          }};
}

Reduced in_float(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(x.detach().to(at::kFloat));
  return {buffers, [tensors, buffers] {
            for (size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(buffers[i]);
          }};
}

bool all_of(const std::vector<at::Tensor>& tensors, bool (*is_kind)(at::ScalarType)) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& x) {
    return x.defined() && x.layout() == at::kStrided && is_kind(x.scalar_type());
  });
}

}  // namespace

Reduced make_reduced(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  const bool is_max = op.op_ == RedOpType::MAX;
  if ((is_max || op.op_ == RedOpType::MIN) && all_of(tensors, at::isFloatingType)) {
    return with_nans_first(tensors, is_max ? 1 : -1);
  }
  if (op.op_ == RedOpType::AVG && all_of(tensors, at::isReducedFloatingType)) return in_float(tensors);
  return {tensors, {}};
}

}  // namespace serried::gloo
