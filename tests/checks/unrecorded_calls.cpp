// Calls of ops that the conformance vectors do not have, made from their schemas.
#include "tests/checks/unrecorded_calls.h"

#include <map>

namespace serried::testing {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;
using Integers = std::map<std::string, std::vector<int64_t>>;

// Takes the next shape where the schema has a tensor, a named number where it has one, else something harmless.
c10::IValue value_of(const c10::Argument& argument, const Shapes& shapes, size_t& next, const Integers& integers) {
  using c10::TypeKind;
  c10::TypePtr type = argument.type();
  const bool optional = type->kind() == TypeKind::OptionalType;
  if (optional) type = type->expectRef<c10::OptionalType>().getElementType();
  const auto given = integers.find(argument.name());
  if (type->kind() == TypeKind::TensorType) {
    return next < shapes.size() ? c10::IValue(at::zeros(shapes[next++])) : c10::IValue();
  }
  if (type->kind() == TypeKind::ListType) {
    const TypeKind element = type->expectRef<c10::ListType>().getElementType()->kind();
    if (element == TypeKind::TensorType) return std::vector<at::Tensor>{at::zeros(shapes.at(next++))};
    if (element == TypeKind::BoolType) return c10::List<bool>({true, true, true});
    if (given != integers.end()) return given->second;
  }
  if (given != integers.end())
    return type->kind() == TypeKind::BoolType ? c10::IValue(given->second[0] != 0) : given->second[0];
  if (argument.default_value()) return *argument.default_value();
  if (optional) return {};
  if (type->kind() == TypeKind::BoolType) return false;
  return type->kind() == TypeKind::FloatType ? c10::IValue(0.5) : c10::IValue(int64_t(1));
}

SampleCall call_of(const std::string& name, const Shapes& shapes, const Integers& integers) {
  const size_t dot = name.find('.');
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
      ("aten::" + name.substr(0, dot)).c_str(), dot == name.npos ? "" : name.substr(dot + 1).c_str());
  torch::jit::Stack arguments;
  size_t next = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    arguments.push_back(value_of(argument, shapes, next, integers));
  }
  return SampleCall(op.schema(), std::move(arguments));
}

std::map<std::string, SampleCall> all_calls() {
  const std::vector<int64_t> image = {4, 6, 3, 5}, channels = {6}, heads = {2, 4, 6, 8};
  std::map<std::string, SampleCall> calls;
  const auto add = [&](const std::string& name, const Shapes& shapes, const Integers& integers = {}) {
    calls.emplace(name, call_of(name, shapes, integers));
  };
  add("_batch_norm_no_update", {image, channels, channels, channels, channels});
  add("_batch_norm_with_update_functional", {image, channels, channels, channels, channels});
  add("_fused_adagrad", {{4, 6}, {4, 6}, {4, 6}, {}});
  add("_fused_rms_norm", {{4, 3, 6}, {6}}, {{"normalized_shape", {6}}});
  add("_fused_rms_norm_backward", {{4, 3, 6}, {4, 3, 6}, {4, 3, 1}, {6}}, {{"normalized_shape", {6}}});
  add("_masked_softmax", {{2, 3, 4, 4}, {2, 3, 4, 4}}, {{"dim", {-1}}});
  add("_native_batch_norm_legit.no_stats", {image, channels, channels}, {{"training", {1}}});
  add("_native_batch_norm_legit_functional", {image, channels, channels, channels, channels}, {{"training", {1}}});
  add("_native_batch_norm_legit_no_training", {image, channels, channels, channels, channels});
  add("_scaled_dot_product_flash_attention_for_cpu", {heads, heads, heads});
  add("_scaled_dot_product_flash_attention_for_cpu_backward", {heads, heads, heads, heads, heads, {2, 4, 6}});
  add("_weight_norm_interface", {{4, 6}, {4, 1}});
  add("_weight_norm_interface_backward", {{4, 6}, {4, 6}, {4, 1}, {4, 1}}, {{"dim", {0}}});
  add("col2im", {{4, 6, 20}},
      {{"output_size", {5, 6}},
       {"kernel_size", {2, 3}},
       {"dilation", {1, 1}},
       {"padding", {0, 0}},
       {"stride", {1, 1}}});
  add("constant_pad_nd", {{4, 6, 8}}, {{"pad", {1, 1}}});
  add("embedding_dense_backward", {{4, 3, 6}, {4, 3}}, {{"num_weights", {10}}, {"padding_idx", {-1}}});
  add("im2col", {{4, 6, 5, 6}},
      {{"kernel_size", {2, 3}}, {"dilation", {1, 1}}, {"padding", {0, 0}}, {"stride", {1, 1}}});
  add("lu_unpack", {{2, 3, 3}, {2, 3}});
  add("matmul", {{2, 3, 4}, {4, 5}});
  add("native_batch_norm_backward", {image, image, channels, channels, channels, channels, channels}, {{"train", {1}}});
  add("slice_scatter", {{4, 6, 8}, {4, 3, 8}}, {{"dim", {1}}, {"start", {0}}, {"end", {3}}});
  add("view.dtype", {{4, 6}}, {{"dtype", {int64_t(at::kDouble)}}});
  return calls;
}

}  // namespace

const SampleCall* unrecorded(const std::string& name) {
  static const std::map<std::string, SampleCall> calls = all_calls();
  const auto found = calls.find(name);
  return found == calls.end() ? nullptr : &found->second;
}

}  // namespace serried::testing
