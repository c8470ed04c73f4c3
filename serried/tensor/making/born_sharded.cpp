// Factory ops inside a BornSharded scope.
#include "serried/tensor/making/born_sharded.h"

#include <ATen/ops/randperm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/making/make_part.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"

namespace serried {
namespace {

using detail::OpCall;
using detail::Part;
using torch::jit::Stack;

Sizes sizes_of(const OpCall& factory) {
  return factory.value("size")->toIntVector();
}

// Behind "aten::".
std::string_view bare_name(const OpCall& factory) {
  return std::string_view(factory.name()).substr(6);
}

at::TensorOptions options_of(const OpCall& factory) {
  return at::TensorOptions()
      .dtype(factory.optional<at::ScalarType>("dtype"))
      .memory_format(factory.optional<at::MemoryFormat>("memory_format"));
}

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

bool is_plain_cpu(const OpCall& factory) {
  const auto layout = factory.optional<at::Layout>("layout");
  const auto device = factory.optional<at::Device>("device");
  return layout.value_or(at::kStrided) == at::kStrided && (!device || device->is_cpu());
}

detail::StreamOp random_op(const OpCall& factory) {
  const std::string_view name = bare_name(factory);
  if (name == "rand") return detail::stream_op("aten::uniform_", "", {0., 1.});
  if (name == "randn") return detail::stream_op("aten::normal_", "", {0., 1.});
  if (name == "normal") return detail::stream_op("aten::normal_", "", {*factory.value("mean"), *factory.value("std")});
  return detail::stream_op("aten::random_", "from", {factory.integer("low"), *factory.value("high")});
}

at::TensorOptions options_with_dtype(const OpCall& factory) {
  const at::TensorOptions options = options_of(factory);
  if (options.has_dtype()) return options;
  if (bare_name(factory) == "full")
    return options.dtype(detail::dtype_of_fill(factory.value("fill_value")->toScalar()));
  return bare_name(factory) == "randint" ? options.dtype(at::kLong) : options;
}

Part make_and_fill(const OpCall& factory, const DeviceMesh& mesh, const Placements& placements) {
  const std::string_view name = bare_name(factory);
  const Part part = detail::make_part({name, sizes_of(factory), mesh, placements, options_with_dtype(factory)});
  if (name == "empty") return part;
  if (name == "zeros" || name == "ones" || name == "full") {
    const at::Scalar value = name == "full" ? factory.value("fill_value")->toScalar() : at::Scalar(name == "ones");
    detail::fill_value(part, value);
    return part;
  }
  detail::fill_random(name, part, random_op(factory), factory.optional<at::Generator>("generator"));
  return part;
}

// The plain op, as if there were no scope.
at::Tensor run_plainly(const c10::OperatorHandle& op, const OpCall& factory, const DeviceMesh& mesh) {
  if (bare_name(factory) == "randperm") {
    const auto given = factory.optional<at::Generator>("generator");
    const at::Generator generator = generator_for(given, mesh);
    const detail::LocalOnly guard;
    const at::TensorOptions options = options_of(factory);
    return at::randperm(factory.integer("n"), generator, options.has_dtype() ? options : options.dtype(at::kLong));
  }
  const detail::LocalOnly guard;
  Stack stack(factory.arguments().begin(), factory.arguments().end());
  op.callBoxed(stack);
  return stack.back().toTensor();
}

}  // namespace

struct BornSharded::Scope {
  DeviceMesh mesh;
  PlacementFunction placements;
  Scope* outer;
  c10::impl::IncludeDispatchKeyGuard include;

  static thread_local Scope* current;
};

thread_local BornSharded::Scope* BornSharded::Scope::current = nullptr;

BornSharded::BornSharded(const DeviceMesh& mesh, PlacementFunction placements) {
  if (!placements) {
    raise<c10::ValueError>({"BornSharded", "the placement function is empty",
                            "pass a function from sizes to placements, one per axis of the mesh"});
  }
  scope_.reset(new Scope{mesh, std::move(placements), Scope::current, c10::impl::IncludeDispatchKeyGuard(kHomeKey)});
  Scope::current = scope_.get();
}

BornSharded::~BornSharded() {
  Scope::current = scope_->outer;
}

bool detail::make_born_sharded(const c10::OperatorHandle& op, Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  const BornSharded::Scope* scope = BornSharded::Scope::current;
  if (scope == nullptr || !makes_from_nothing(schema)) return false;
  const OpCall factory(op, stack);
  const bool is_part_only = contains(kPartOnly, bare_name(factory));
  if (!is_part_only && !contains(kWholeThenCut, bare_name(factory))) return false;
  if (!is_plain_cpu(factory)) return false;
  const auto placements = [&](at::IntArrayRef sizes) {
    return sizes.empty() ? Placements() : scope->placements(sizes);
  };
  Part part;
  if (is_part_only) {
    part = make_and_fill(factory, scope->mesh, placements(sizes_of(factory)));
  } else {
    const at::Tensor whole = run_plainly(op, factory, scope->mesh);
    part = detail::cut_whole(bare_name(factory), whole, scope->mesh, placements(whole.sizes()));
  }
  return finish(op, stack, {wrap(part.local, part.spec)});
}

}  // namespace serried
