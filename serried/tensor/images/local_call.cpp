// Arguments of image ops, and their local calls.
#include "serried/tensor/images/local_call.h"

#include "serried/tape/tape.h"

namespace serried::detail {

std::optional<Sizes> per_dim(const OpCall& call, std::string_view argument, size_t ndim) {
  std::optional<Sizes> given = call.integers(argument);
  if (!given || (given->size() != 1 && given->size() != ndim)) return std::nullopt;
  if (given->size() == 1) given->assign(ndim, given->front());
  return given;
}

torch::jit::Stack run_local(const c10::OperatorHandle& op, const OpCall& call, const Replaced& replaced) {
  torch::jit::Stack stack(call.arguments().begin(), call.arguments().end());
  for (const auto& [name, value] : replaced) stack.at(size_t(call.index(name))) = value;
  tape::run(op, stack);
  return stack;
}

bool same_but_space(const at::Tensor& a, const at::Tensor& b, size_t ndim) {
  if (a.dim() != b.dim() || a.dim() < int64_t(ndim)) return false;
  const size_t others = size_t(a.dim()) - ndim;
  return a.sizes().slice(0, others) == b.sizes().slice(0, others);
}

}  // namespace serried::detail
