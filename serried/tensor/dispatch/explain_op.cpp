// explain of an op by name, on tensors.
#include "serried/base/error.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/dispatch/call_kind.h"
#include "serried/tensor/dispatch/explain.h"
#include "serried/tensor/dispatch/op_by_name.h"

namespace serried {
namespace {

constexpr const char* kExplain = "explain";

std::string explain_stack(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  detail::OpInfo& info = detail::op_info(op);
  if (int(stack.size()) != info.num_arguments) {
    raise<c10::ValueError>({kExplain,
                            c10::str(op.schema(), " takes ", info.num_arguments, " arguments, not ", stack.size()),
                            "pass every argument of the schema, in order"});
  }
  detail::Arguments arguments;
  if (detail::kind_of_call(info, stack) == &kDTensor) detail::collect(info, stack, arguments);
  if (arguments.first == nullptr) {
    raise<c10::ValueError>({kExplain, "no argument of " + info.name + " is a DTensor", "pass at least one DTensor"});
  }
  const DeviceMesh& mesh = arguments.first->mesh;
  return explain(detail::describe(info, arguments, stack), detail::current_placements(arguments),
                 {mesh.shape(), mesh.dim_names(), spmd::cost_models(mesh)});
}

}  // namespace

std::string explain(const std::string& op, const std::vector<at::Tensor>& tensors) {
  const c10::OperatorHandle handle = detail::find_op_for(op, tensors.size());
  return explain_stack(handle, detail::fill_arguments(handle.schema(), tensors));
}

std::string explain(const std::string& op, std::initializer_list<at::Tensor> tensors) {
  return explain(op, std::vector<at::Tensor>(tensors));
}

std::string explain(const std::string& op, const torch::jit::Stack& arguments) {
  size_t num_tensors = 0;
  for (const c10::IValue& value : arguments) num_tensors += value.isTensor();
  return explain_stack(detail::find_op_for(op, num_tensors), arguments);
}

}  // namespace serried
