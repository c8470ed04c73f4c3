// Composites that write into a plain tensor they have made: for DTensors their out= form gets a DTensor instead.
#include <torch/library.h>

#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/making/factories.h"

namespace serried {
namespace {

using torch::jit::Stack;

// The first DTensor among the tensor arguments; null where all are plain.
const DTensorMeta* first_dtensor(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) continue;
    if (const DTensorMeta* meta = dtensor_meta(argument.toTensor())) return meta;
  }
  return nullptr;
}

// One rank per matrix: the sizes without the last two.
bool matrix_rank(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const DTensorMeta* meta = first_dtensor(arguments);
  const at::Tensor& input = arguments[0].toTensor();
  if (meta == nullptr || op.schema().arguments().back().is_out()) return false;
  if (input.dim() < 2) return false;  // the composite says so
  const std::string& overload = op.schema().overload_name();
  const std::string out_overload = overload.empty()           ? "out"
                                   : overload == "tol_tensor" ? "out_tol_tensor"
                                                              : overload + "_out";
  at::Tensor result = empty(input.sizes().slice(0, size_t(input.dim() - 2)), meta->spec->mesh, {}, at::kLong);
  Stack with_out(arguments.begin(), arguments.end());
  with_out.emplace_back(result);
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::linalg_matrix_rank", out_overload.c_str()).callBoxed(with_out);
  return detail::finish(op, stack, {result});
}

// Autograd comes before our key and would take the composite apart before a handler sees it. The result is a count:
// there is no gradient to record.
void before_autograd(const c10::OperatorHandle& op, Stack* stack) {
  if (matrix_rank(op, *stack)) return;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

TORCH_LIBRARY_IMPL(aten, Autograd, m) {
  for (const char* overload : {"", ".atol_rtol_float", ".atol_rtol_tensor", ".tol_tensor"}) {
    m.impl((std::string("linalg_matrix_rank") + overload).c_str(),
           torch::CppFunction::makeFromBoxedFunction<&before_autograd>());
  }
}

}  // namespace

std::vector<HandlerEntry> own_output_handlers() {
  return {{"aten::linalg_matrix_rank", matrix_rank}};
}

}  // namespace serried
