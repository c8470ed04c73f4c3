// Factory ops inside a BornSharded scope.
#include "serried/tensor/making/born_sharded.h"

#include <ATen/ops/randperm.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/making/make_part.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"

namespace serried {
namespace {

thread_local BornSharded* current = nullptr;

using detail::Part;
using torch::jit::Stack;

// A factory call by argument name.
struct Factory {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> values;

  /// None where the schema has no such argument.
  c10::IValue value(const char* name) const {
    const std::optional<int> index = schema.argumentIndexWithName(name);
    return index ? values[*index] : c10::IValue();
  }
  std::vector<int64_t> sizes() const { return value("size").toIntVector(); }
  std::string_view name() const { return std::string_view(schema.name()).substr(6); }  // behind "aten::"
  at::TensorOptions options() const {
    return at::TensorOptions()
        .dtype(value("dtype").toOptional<at::ScalarType>())
        .memory_format(value("memory_format").toOptional<at::MemoryFormat>());
  }
};

// Known by name: an op that reads a file or makes a sparse tensor is no business of ours.
constexpr std::array<std::string_view, 20> kWholeThenCut = {
    "arange",       "bartlett_window", "blackman_window", "empty_permuted", "empty_strided", "eye",      "fft_fftfreq",
    "fft_rfftfreq", "hamming_window",  "hann_window",     "kaiser_window",  "linspace",      "logspace", "range",
    "tril_indices", "triu_indices",    "vander",          "scalar_tensor",  "randperm",      "complex"};
constexpr std::array<std::string_view, 8> kPartOnly = {"empty", "full",    "normal", "ones",
                                                       "rand",  "randint", "randn",  "zeros"};

bool contains(c10::ArrayRef<std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool makes_from_nothing(const c10::FunctionSchema& schema) {
  if (!schema.name().starts_with("aten::") || schema.returns().size() != 1) return false;
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::TypeKind kind = argument.type()->kind();
    if (kind == c10::TypeKind::TensorType || argument.name() == "names") return false;
  }
  return schema.argumentIndexWithName("layout").has_value();
}

bool is_plain_cpu(const Factory& factory) {
  const auto layout = factory.value("layout").toOptional<at::Layout>();
  const auto device = factory.value("device").toOptional<at::Device>();
  return layout.value_or(at::kStrided) == at::kStrided && (!device || device->is_cpu());
}

detail::StreamOp random_op(const Factory& factory) {
  const std::string_view name = factory.name();
  if (name == "rand") return detail::stream_op("aten::uniform_", "", {0., 1.});
  if (name == "randn") return detail::stream_op("aten::normal_", "", {0., 1.});
  if (name == "normal") return detail::stream_op("aten::normal_", "", {factory.value("mean"), factory.value("std")});
  const c10::IValue low = factory.value("low");
  return detail::stream_op("aten::random_", "from", {low.isNone() ? c10::IValue(0) : low, factory.value("high")});
}

at::TensorOptions options_with_dtype(const Factory& factory) {
  const at::TensorOptions options = factory.options();
  if (options.has_dtype()) return options;
  if (factory.name() == "full") return options.dtype(detail::dtype_of_fill(factory.value("fill_value").toScalar()));
  return factory.name() == "randint" ? options.dtype(at::kLong) : options;
}

Part make_and_fill(const Factory& factory, const DeviceMesh& mesh, const Placements& placements) {
  const std::string_view name = factory.name();
  const Part part = detail::make_part({name, factory.sizes(), mesh, placements, options_with_dtype(factory)});
  if (name == "empty") return part;
  if (name == "zeros" || name == "ones" || name == "full") {
    const at::Scalar value = name == "full" ? factory.value("fill_value").toScalar() : at::Scalar(name == "ones");
    detail::fill_value(part, value);
    return part;
  }
  detail::fill_random(name, part, random_op(factory), factory.value("generator").toOptional<at::Generator>());
  return part;
}

// The plain op, as if there were no scope.
at::Tensor run_plainly(const c10::OperatorHandle& op, const Factory& factory, const DeviceMesh& mesh) {
  if (factory.name() == "randperm") {
    const auto given = factory.value("generator").toOptional<at::Generator>();
    const at::Generator generator = generator_for(given, mesh);
    const detail::LocalOnly guard;
    const at::TensorOptions options = factory.options();
    return at::randperm(factory.value("n").toInt(), generator,
                        options.has_dtype() ? options : options.dtype(at::kLong));
  }
  const detail::LocalOnly guard;
  Stack stack(factory.values.begin(), factory.values.end());
  op.callBoxed(stack);
  return stack.back().toTensor();
}

}  // namespace

BornSharded::BornSharded(const DeviceMesh& mesh, PlacementFunction placements)
    : mesh_(mesh), placements_(std::move(placements)), previous_(current), include_(kHomeKey) {
  if (!placements_) {
    raise<c10::ValueError>({"BornSharded", "the placement function is empty",
                            "pass a function from sizes to placements, one per axis of the mesh"});
  }
  current = this;
}

BornSharded::~BornSharded() {
  current = previous_;
}

bool make_born_sharded(const c10::OperatorHandle& op, Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  if (current == nullptr || !makes_from_nothing(schema)) return false;
  const Factory factory{schema, torch::jit::last(stack, schema.arguments().size())};
  const bool is_part_only = contains(kPartOnly, factory.name());
  if (!is_part_only && !contains(kWholeThenCut, factory.name())) return false;
  if (!is_plain_cpu(factory)) return false;
  const DeviceMesh& mesh = current->mesh_;
  const auto placements = [](at::IntArrayRef sizes) {
    return sizes.empty() ? Placements() : current->placements_(sizes);
  };
  Part part;
  if (is_part_only) {
    part = make_and_fill(factory, mesh, placements(factory.sizes()));
  } else {
    const at::Tensor whole = run_plainly(op, factory, mesh);
    part = detail::cut_whole(factory.name(), whole, mesh, placements(whole.sizes()));
  }
  torch::jit::drop(stack, schema.arguments().size());
  stack.emplace_back(wrap(part.local, part.spec));
  return true;
}

}  // namespace serried
