// Checks a factory's arguments and fills the new part.
#include "serried/tensor/making/make_part.h"

#include <ATen/ops/cat.h>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/random/random.h"
#include "serried/tensor/random/random_fill.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

void check_mesh(std::string_view where, const DeviceMesh& mesh) {
  if (mesh.contains_this_rank()) return;
  raise<c10::ValueError>({where, c10::str("rank ", mesh.get_rank(), " is not in ", mesh.to_string()),
                          "call it on the ranks of the mesh only: if (mesh.contains_this_rank())"});
}

void check_options(const FactoryCall& call) {
  if (call.options.layout() != at::kStrided) {
    raise<c10::ValueError>(
        {call.where, c10::str("layout is ", call.options.layout()), "leave the layout out: a DTensor is strided"});
  }
  if (call.options.device().type() != at::kCPU) {
    raise<c10::ValueError>({call.where, c10::str("device is ", call.options.device()),
                            "leave the device out: the mesh decides, and it is " + call.mesh.device_type()});
  }
}

void check_sizes(const FactoryCall& call) {
  for (const int64_t size : call.sizes) {
    if (size >= 0) continue;
    raise<c10::ValueError>({call.where, c10::str("sizes are ", call.sizes), "pass sizes of 0 or more"});
  }
}

void check_average(std::string_view where, const Placements& placements, at::ScalarType dtype) {
  if (!at::isIntegralType(dtype, true)) return;
  for (const Placement& placement : placements) {
    if (!placement.is_partial(ReduceKind::avg)) continue;
    raise<c10::ValueError>({where, c10::str("an average of ", at::toString(dtype), " is not exact"),
                            "use Partial(\"sum\") or a floating dtype"});
  }
}

Placements full_placements(std::string_view where, const Placements& given, int64_t tensor_ndim,
                           const DeviceMesh& mesh) {
  if (given.empty()) return Placements(mesh.ndim());
  return checked_placements(where, given, tensor_ndim, mesh.ndim());
}

SpecPtr checked_spec(const FactoryCall& call) {
  check_mesh(call.where, call.mesh);
  check_options(call);
  check_sizes(call);
  const at::ScalarType dtype = c10::typeMetaToScalarType(call.options.dtype());
  const Placements placements = full_placements(call.where, call.placements, int64_t(call.sizes.size()), call.mesh);
  check_average(call.where, placements, dtype);
  const at::MemoryFormat format = call.options.memory_format_opt().value_or(at::MemoryFormat::Contiguous);
  return intern_spec(call.mesh, placements, call.sizes, strides_for(call.sizes, format), dtype);
}

}  // namespace

Part make_part(const FactoryCall& call) {
  const SpecPtr spec = checked_spec(call);
  return {empty_part(*spec), spec};
}

void fill_value(const Part& part, const at::Scalar& value) {
  const LocalOnly guard;
  if (const auto identity = identity_here(part.spec->placements, part.spec->mesh.position())) {
    return fill_identity_(part.local, *identity);
  }
  part.local.fill_(value);
}

void fill_random(std::string_view where, const Part& part, const StreamOp& op,
                 const std::optional<at::Generator>& generator) {
  reject_partial(where, *part.spec);
  fill_by_stream(part.local, *part.spec, op, generator_for(generator, part.spec->mesh));
}

Part cut_whole(std::string_view where, const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  const Part part = make_part({where, whole.sizes(), mesh, placements, whole.options()});
  const LocalOnly guard;
  if (const auto identity = identity_here(part.spec->placements, mesh.position())) {
    fill_identity_(part.local, *identity);
    return part;
  }
  at::Tensor cut = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    std::vector<at::Tensor> pieces{cut.narrow(dim, 0, 0)};
    for (const Span& span : owned_spans(whole.size(dim), dim, part.spec->placements, mesh.position())) {
      pieces.push_back(cut.narrow(dim, span.begin, span.size));
    }
    cut = pieces.size() == 2 ? pieces.back() : at::cat(pieces, dim);
  }
  part.local.copy_(cut);
  return part;
}

at::ScalarType dtype_of_fill(const at::Scalar& fill) {
  if (fill.isBoolean()) return at::kBool;
  if (fill.isIntegral(false)) return at::kLong;
  const at::ScalarType real = c10::get_default_dtype_as_scalartype();
  return fill.isComplex() ? c10::toComplexType(real) : real;
}

}  // namespace serried::detail
