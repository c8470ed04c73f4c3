// Schemas and kernels of the random fills. All that decides them is a constant but the generator, so that a replay
// draws anew and moves the generator on.
#include "serried/tensor/random/random_fill.h"

#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/tape/tape.h"
#include "serried/tensor/random/philox_fill.h"

namespace serried::detail {
namespace {

using Scalars = at::ArrayRef<at::Scalar>;
using torch::jit::Stack;

void run_by_key(const at::Tensor& local, const PlacedPart& part, std::string_view kind, Scalars arguments,
                const at::Generator& generator) {
  const uint64_t key = draw_key(generator);
  if (kind == "bernoulli") return philox_bernoulli_(local, part, key, arguments.at(0).toDouble());
  if (kind == "normal") return philox_normal_(local, part, key);
  if (kind == "uniform") return philox_uniform_(local, part, key);
  if (kind == "integers") return philox_integers_(local, part, key, arguments.at(0).toLong(), arguments.at(1).toLong());
  raise<c10::ValueError>({"serried::random_fill_", c10::str("there is no kind \"", kind, "\""),
                          "pass bernoulli, integers, normal or uniform"});
}

// Arguments that are None come last.
std::vector<at::Scalar> as_scalars(const StreamOp& op) {
  std::vector<at::Scalar> scalars;
  for (const c10::IValue& argument : op.arguments) {
    if (!argument.isNone()) scalars.push_back(argument.toScalar());
  }
  return scalars;
}

// `name` with its overload, "aten::random_.from".
StreamOp as_stream_op(const std::string& name, Scalars scalars) {
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  StreamOp op = stream_op(name.substr(0, dot).c_str(), overload.c_str(), {});
  for (size_t i = 1; i + 1 < op.op.schema().arguments().size(); ++i) {
    if (i > scalars.size()) {
      op.arguments.emplace_back();
    } else if (scalars[i - 1].isFloatingPoint()) {
      op.arguments.emplace_back(scalars[i - 1].toDouble());
    } else {
      op.arguments.emplace_back(scalars[i - 1].toLong());
    }
  }
  return op;
}

void fill_kernel(const at::Tensor& part, c10::string_view kind, Scalars arguments, at::IntArrayRef sizes,
                 at::IntArrayRef strides, c10::string_view placements, at::IntArrayRef mesh, at::IntArrayRef at,
                 at::Generator generator) {
  const Placements placed = parse_placements(placements);
  run_by_key(part, {sizes, strides, placed, {mesh, at}}, kind, arguments, generator);
}

void stream_kernel(const at::Tensor& part, c10::string_view op, Scalars arguments, at::IntArrayRef sizes,
                   at::IntArrayRef strides, c10::string_view placements, at::IntArrayRef mesh, at::IntArrayRef at,
                   at::Generator generator) {
  const Placements placed = parse_placements(placements);
  stream_fill(part, {sizes, strides, placed, {mesh, at}}, as_stream_op(std::string(op), arguments), generator);
}

#define SERRIED_PART "int[] sizes, int[] strides, str placements, int[] mesh, int[] at"

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("random_fill_(Tensor(a!) part, str kind, Scalar[] arguments, " SERRIED_PART ", Generator? generator) -> ()");
  m.def("random_stream_(Tensor(a!) part, str op, Scalar[] arguments, " SERRIED_PART ", Generator? generator) -> ()");
}

#undef SERRIED_PART

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("random_fill_", fill_kernel);
  m.impl("random_stream_", stream_kernel);
}

void call_recorded(const char* op, const at::Tensor& local, std::string what, Scalars arguments, const Spec& spec,
                   const at::Generator& generator) {
  const Position at = spec.mesh.position();
  c10::List<at::Scalar> scalars;
  for (const at::Scalar& argument : arguments) scalars.push_back(argument);
  Stack stack;
  torch::jit::push(stack, local, std::move(what), std::move(scalars), c10::IntArrayRef(spec.sizes),
                   c10::IntArrayRef(spec.strides), to_string(spec.placements), at.mesh_shape, at.coordinate, generator);
  tape::run(c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), stack);
}

}  // namespace

void fill_by_stream(const at::Tensor& local, const Spec& spec, const StreamOp& op, const at::Generator& generator) {
  if (!tape::is_recording()) return stream_fill(local, spec, op, generator);
  call_recorded("serried::random_stream_", local, c10::toString(op.op.operator_name()), as_scalars(op), spec,
                generator);
}

void fill_by_key(const at::Tensor& local, const Spec& spec, std::string_view kind, Scalars arguments,
                 const at::Generator& generator) {
  if (!tape::is_recording()) return run_by_key(local, spec, kind, arguments, generator);
  call_recorded("serried::random_fill_", local, std::string(kind), arguments, spec, generator);
}

}  // namespace serried::detail
