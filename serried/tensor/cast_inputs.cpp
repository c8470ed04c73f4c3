// Which parameters have inputs cast, and the ops that are marked for nothing else.
#include "serried/tensor/cast_inputs.h"

#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <functional>
#include <vector>

#include "serried/tensor/above_key.h"
#include "serried/tensor/gather_on_use.h"

namespace serried::detail {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kBelowCasts(c10::DispatchKeySet::FULL_AFTER, kAboveKey);

// Of a parameter that is gathered on use, or of a view of one.
const GatherOnUse* gather_behind(const at::Tensor& t) {
  const DistMeta* meta = t.defined() ? dist_meta(t.unsafeGetTensorImpl()) : nullptr;
  if (meta == nullptr) return nullptr;
  if (meta->kind == &kLazyView) return gather_of(*static_cast<const LazyViewMeta*>(meta)->base);
  return meta->kind == &kDTensor ? gather_of(*static_cast<const DTensorMeta*>(meta)) : nullptr;
}

// The first parameter among the arguments that has inputs cast.
at::Tensor casting_parameter(c10::ArrayRef<IValue> arguments) {
  for (const IValue& value : arguments) {
    std::vector<at::Tensor> tensors;
    if (value.isTensor()) tensors = {value.toTensor()};
    if (value.isTensorList()) tensors = value.toTensorVector();
    for (const at::Tensor& t : tensors) {
      const GatherOnUse* gather = gather_behind(t);
      if (gather != nullptr && gather->casts_inputs() && gather->other_dtype().has_value()) return t;
    }
  }
  return {};
}

at::Tensor cast(const at::Tensor& x, const at::Tensor& parameter) {
  const std::optional<at::ScalarType> dtype = cast_beside(x, parameter);
  return dtype.has_value() ? x.to(*dtype) : x;
}

// The first `num_inputs` arguments are what comes in; the others are parameters, and state that the op writes.
template <size_t num_inputs>
void cast_and_go_on(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t base = stack->size() - op.schema().arguments().size();
  const at::Tensor parameter = casting_parameter(c10::ArrayRef<IValue>(*stack).slice(base));
  for (size_t i = base; parameter.defined() && i < base + num_inputs; ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(value.toTensor(), parameter);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list = value.toTensorVector();
      for (at::Tensor& t : list) t = cast(t, parameter);
      value = std::move(list);
    }
  }
  op.redispatchBoxed(keys & kBelowCasts, stack);
}

bool computes_in_other_dtype(const at::Tensor& parameter) {
  const GatherOnUse* gather = gather_behind(parameter);
  return gather != nullptr && gather->other_dtype().has_value();
}

using c10::SymIntArrayRef;
using Bias = std::optional<at::Tensor>;

// LibTorch's convolutions compare the dtypes that tensors say they have; the one they are made of does not.
at::Tensor convolved(const at::Tensor& input, const at::Tensor& weight,
                     const std::function<at::Tensor(const at::Tensor&)>& convolve) {
  const at::Tensor x = cast(input, weight);
  const bool is_batch = x.dim() == weight.dim();
  const at::Tensor y = convolve(is_batch ? x : x.unsqueeze(0));
  return is_batch ? y : y.squeeze(0);
}

template <class Op>
at::Tensor conv(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight, const Bias& bias,
                SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, c10::SymInt groups) {
  if (!computes_in_other_dtype(weight)) {
    return Op::redispatch(keys & kBelowCasts, input, weight, bias, stride, padding, dilation, std::move(groups));
  }
  const std::vector<c10::SymInt> none(stride.size(), 0);
  return convolved(input, weight, [&](const at::Tensor& x) {
    return at::_ops::convolution::call(x, weight, bias, stride, padding, dilation, false, none, groups);
  });
}

template <class Op>
at::Tensor conv_transpose(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight, const Bias& bias,
                          SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef output_padding,
                          c10::SymInt groups, SymIntArrayRef dilation) {
  if (!computes_in_other_dtype(weight)) {
    return Op::redispatch(keys & kBelowCasts, input, weight, bias, stride, padding, output_padding, std::move(groups),
                          dilation);
  }
  return convolved(input, weight, [&](const at::Tensor& x) {
    return at::_ops::convolution::call(x, weight, bias, stride, padding, dilation, true, output_padding, groups);
  });
}

// It compares dtypes, too.
at::Tensor prelu(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& weight) {
  if (!computes_in_other_dtype(weight)) return at::_ops::prelu::redispatch(keys & kBelowCasts, self, weight);
  std::vector<int64_t> sizes(size_t(self.dim()), 1);
  if (self.dim() > 1) sizes[1] = weight.numel();
  return at::_ops::_prelu_kernel::call(cast(self, weight), weight.reshape(sizes));
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("conv1d", conv<at::_ops::conv1d>);
  m.impl("conv2d", conv<at::_ops::conv2d>);
  m.impl("conv3d", conv<at::_ops::conv3d>);
  m.impl("conv_transpose1d", conv_transpose<at::_ops::conv_transpose1d>);
  m.impl("conv_transpose2d.input", conv_transpose<at::_ops::conv_transpose2d_input>);
  m.impl("conv_transpose3d.input", conv_transpose<at::_ops::conv_transpose3d_input>);
  m.impl("prelu", prelu);
  for (const char* name : {"convolution", "batch_norm", "instance_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_go_on<1>>());
  }
  for (const char* name : {"bilinear", "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input", "lstm_cell",
                           "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_go_on<2>>());
  }
}

}  // namespace

std::optional<at::ScalarType> cast_beside(const at::Tensor& x, const at::Tensor& parameter) {
  const GatherOnUse* gather = gather_behind(parameter);
  if (C10_LIKELY(gather == nullptr)) return std::nullopt;
  const std::optional<at::ScalarType> dtype = gather->casts_inputs() ? gather->other_dtype() : std::nullopt;
  if (!dtype.has_value() || !x.defined() || !c10::isFloatingType(x.scalar_type()) || x.scalar_type() == *dtype) {
    return std::nullopt;
  }
  return gather_behind(x) == nullptr ? dtype : std::nullopt;
}

}  // namespace serried::detail
