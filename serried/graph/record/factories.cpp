// Names of factories, and what they would give.
#include "serried/graph/record/factories.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "serried/tape/recorder.h"

namespace serried::graph {
namespace {

constexpr int64_t kMaxCheckedBytes = int64_t(64) << 20;

// "zeros" for aten::zeros, aten::zeros_like, aten::new_zeros; empty outside of aten.
std::string_view kind_of_factory(std::string_view name) {
  if (!name.starts_with("aten::")) return {};
  name.remove_prefix(6);
  if (name.starts_with("new_")) name.remove_prefix(4);
  if (name.ends_with("_like")) name.remove_suffix(5);
  return name;
}

// The operand of zeros_like and new_zeros tells dtype and shape; so does the result.
torch::jit::Stack arguments_for(const Node& maker, const at::Tensor& like) {
  torch::jit::Stack stack;
  for (const Argument& argument : maker.arguments) {
    stack.push_back(argument.ids.empty() ? argument.constant : c10::IValue(like));
  }
  return stack;
}

}  // namespace

bool makes_unwritten(const c10::OperatorHandle& op) {
  return kind_of_factory(op.operator_name().name).starts_with("empty");
}

bool makes_by_constants(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 9> kKinds = {"arange", "eye",           "full",  "linspace", "logspace",
                                                             "ones",   "scalar_tensor", "zeros", "range"};
  const std::string_view kind = kind_of_factory(op.operator_name().name);
  return std::find(kKinds.begin(), kKinds.end(), kind) != kKinds.end() && is_functional(op.schema());
}

bool is_as_made(const Node& maker, const at::Tensor& whole) {
  if (!whole.device().is_cpu() || int64_t(whole.nbytes()) > kMaxCheckedBytes) return true;
  const tape::Pause pause;
  torch::jit::Stack stack = arguments_for(maker, whole);
  tape::run_unrecorded(maker.op, stack);
  const at::Tensor made = stack.at(0).toTensor().contiguous(), now = whole.contiguous();
  return made.nbytes() == now.nbytes() && std::memcmp(made.const_data_ptr(), now.const_data_ptr(), now.nbytes()) == 0;
}

}  // namespace serried::graph
