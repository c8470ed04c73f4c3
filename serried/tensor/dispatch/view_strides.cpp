// Runs view ops on tensors without data to see what strides they give.
#include "serried/tensor/dispatch/view_strides.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "serried/tensor/meta.h"

namespace serried::detail {

std::vector<c10::DimVector> strides_of_views(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values,
                                             c10::ArrayRef<int> moved) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                 c10::DispatchKeySet(kHomeKey));
  torch::jit::Stack stack(values.begin(), values.end());
  for (size_t i = 0; i < stack.size(); ++i) {
    const DTensorMeta* meta = stack[i].isTensor() ? dtensor_meta(stack[i].toTensor()) : nullptr;
    if (meta == nullptr) continue;
    const Spec& spec = *meta->spec;
    const bool is_moved = std::find(moved.begin(), moved.end(), int(i)) != moved.end();
    stack[i] = at::empty_strided(spec.sizes, is_moved ? serried::contiguous_strides(spec.sizes) : spec.strides,
                                 at::TensorOptions(at::kMeta).dtype(spec.dtype));
  }
  op.callBoxed(stack);
  std::vector<c10::DimVector> strides;
  for (const c10::IValue& result : stack) {
    if (result.isTensor()) strides.emplace_back(result.toTensor().strides());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& t : result.toTensorVector()) strides.emplace_back(t.strides());
  }
  return strides;
}

}  // namespace serried::detail
