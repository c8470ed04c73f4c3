// Composites that make a plain tensor of their own and use it beside the DTensors they are given: they get a DTensor in
// its place.
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

// The call as one of another overload of the op.
bool run_as(const char* overload, Stack arguments, const c10::OperatorHandle& op, Stack& stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), overload).callBoxed(arguments);
  return detail::finish(op, stack, {arguments.at(0)});
}

// It sums into a result of its own: one number per matrix. The out= form gets one to sum into.
bool matrix_rank(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const DTensorMeta* meta = first_dtensor(arguments);
  if (meta == nullptr || op.schema().arguments().back().is_out()) return false;
  const at::Tensor& input = arguments[0].toTensor();
  if (input.dim() < 2) return false;  // the composite says so
  const std::string& overload = op.schema().overload_name();
  const std::string out_overload = overload.empty()           ? "out"
                                   : overload == "tol_tensor" ? "out_tol_tensor"
                                                              : overload + "_out";
  Stack with_out(arguments.begin(), arguments.end());
  with_out.emplace_back(empty(input.sizes().slice(0, size_t(input.dim() - 2)), meta->spec->mesh, {}, at::kLong));
  return run_as(out_overload.c_str(), std::move(with_out), op, stack);
}

// It makes a tensor of q, which it then broadcasts against the input.
bool quantile_of_number(const c10::OperatorHandle& op, Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const DTensorMeta* meta = dtensor_meta(arguments[0].toTensor());
  if (meta == nullptr || op.schema().arguments().back().is_out()) return false;
  const double q = arguments[1].toDouble();
  if (!(q >= 0 && q <= 1)) return false;  // the composite says so
  Stack with_tensor(arguments.begin(), arguments.end());
  with_tensor.at(1) = full({}, q, meta->spec->mesh, {}, meta->spec->dtype);
  return run_as("", std::move(with_tensor), op, stack);
}

// Autograd comes before our key and would take the composite apart before a handler sees it. Whatever the handler
// calls instead goes by autograd as usual. By device: LibTorch prefers a composite to a kernel of all autograd keys.
void before_autograd(const c10::OperatorHandle& op, Stack* stack) {
  if (find_handler(op.schema())(op, *stack)) return;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  for (const char* op :
       {"linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float", "linalg_matrix_rank.atol_rtol_tensor",
        "linalg_matrix_rank.tol_tensor", "nanquantile.scalar", "quantile.scalar"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&before_autograd>());
  }
}

}  // namespace

std::vector<HandlerEntry> own_tensor_handlers() {
  return {
      {"aten::linalg_matrix_rank", matrix_rank},
      {"aten::nanquantile.scalar", quantile_of_number},
      {"aten::quantile.scalar", quantile_of_number},
  };
}

}  // namespace serried
