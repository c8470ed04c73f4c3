// Local tensors and results for handlers.
#include "serried/tensor/dispatch/handling.h"

#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {

bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::initializer_list<c10::IValue> results) {
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

at::Tensor local_as(const DTensorMeta& meta, const Placements& to) {
  return meta.spec->placements == to ? meta.local : redistribute_local(meta.local, *meta.spec, to);
}

at::Tensor whole_local(const DTensorMeta& meta) {
  return local_as(meta, Placements(meta.spec->placements.size()));
}

}  // namespace serried::detail
