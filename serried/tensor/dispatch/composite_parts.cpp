// Runs a composite op on the meta device, with a recorder that writes down names.
#include "serried/tensor/dispatch/composite_parts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/tape/recorder.h"

namespace serried::detail {
namespace {

class Names final : public tape::Recorder {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const std::string name = c10::toString(op.operator_name());
    if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
    tape::run_unrecorded(op, stack);
  }
  void rely_on(tape::Fact) override {}
  void rely_on_life(const std::string&, std::weak_ptr<const void>) override {}
  void before_replay(std::function<void()>) override {}
  void after_replay(std::function<void()>) override {}
  void meet(c10::TensorImpl*) override {}

  std::vector<std::string> take() { return std::move(names_); }

 private:
  std::vector<std::string> names_;
};

at::Tensor without_data(const spmd::TensorArg& tensor) {
  return at::empty_strided(tensor.sizes, tensor.strides, at::TensorOptions(tensor.dtype).device(at::kMeta));
}

torch::jit::Stack without_data(const spmd::OpCall& call) {
  torch::jit::Stack stack = call.arguments().vec();
  for (const spmd::TensorArg& tensor : call.tensors()) {
    c10::IValue& argument = stack[size_t(tensor.argument)];
    if (tensor.list_index < 0) {
      argument = without_data(tensor);
      continue;
    }
    if (tensor.list_index == 0) argument = argument.toTensorList().copy();
    argument.toTensorList().set(size_t(tensor.list_index), without_data(tensor));
  }
  return stack;
}

}  // namespace

std::string CompositeParts::to_string() const {
  if (names.empty()) return "other ops";
  return c10::Join(", ", names) + (is_complete ? "" : " and what follows");
}

CompositeParts parts_of(const c10::OperatorHandle& op, const spmd::OpCall& call) {
  if (call.has_out()) return {};  // tensors of the caller's
  const tape::Pause off_tape;
  const at::NoGradGuard no_grad;
  Names names;
  bool ran = true;
  try {
    torch::jit::Stack stack = without_data(call);
    const tape::Scope scope(names);
    op.callBoxed(stack);
  } catch (const std::exception&) {
    ran = false;
  }
  return {names.take(), ran};
}

}  // namespace serried::detail
