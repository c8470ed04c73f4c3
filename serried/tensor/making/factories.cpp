// New DTensors, part by part.
#include "serried/tensor/making/factories.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/randperm.h>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/making/make_part.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"

namespace serried {
namespace {

using detail::make_part;
using detail::Part;

DTensor result(const Part& part, const at::TensorOptions& options) {
  at::Tensor t = wrap(part.local, part.spec);
  if (options.requires_grad()) t.set_requires_grad(true);
  return DTensor(std::move(t));
}

at::TensorOptions with_default(at::TensorOptions options, at::ScalarType dtype) {
  return options.has_dtype() ? options : options.dtype(dtype);
}

DTensor filled(const detail::FactoryCall& call, const at::Scalar& value) {
  const Part part = make_part(call);
  detail::fill_value(part, value);
  return result(part, call.options);
}

DTensor drawn(const detail::FactoryCall& call, const detail::StreamOp& op) {
  const Part part = make_part(call);
  detail::fill_random(call.where, part, op);
  return result(part, call.options);
}

// `make` gives the whole as a plain tensor.
template <class Make>
DTensor cut(const detail::FactoryCall& call, const Make& make) {
  at::Tensor whole;
  {
    const detail::LocalOnly guard;
    whole = make(call.options.requires_grad(std::nullopt));
  }
  return result(detail::cut_whole(call.where, whole, call.mesh, call.placements), call.options);
}

}  // namespace

DTensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return result(make_part({"empty", sizes, mesh, placements, options}), options);
}

DTensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return filled({"zeros", sizes, mesh, placements, options}, 0);
}

DTensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return filled({"ones", sizes, mesh, placements, options}, 1);
}

DTensor full(at::IntArrayRef sizes, const at::Scalar& fill, const DeviceMesh& mesh, const Placements& placements,
             at::TensorOptions options) {
  options = with_default(options, detail::dtype_of_fill(fill));
  return filled({"full", sizes, mesh, placements, options}, fill);
}

DTensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return drawn({"rand", sizes, mesh, placements, options}, detail::stream_op("aten::uniform_", "", {0., 1.}));
}

DTensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return drawn({"randn", sizes, mesh, placements, options}, detail::stream_op("aten::normal_", "", {0., 1.}));
}

DTensor randint(int64_t low, int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                at::TensorOptions options) {
  if (low >= high) {
    raise<c10::ValueError>(
        {"randint", c10::str("there is no integer from ", low, " up to but not ", high), "pass low < high"});
  }
  return drawn({"randint", sizes, mesh, placements, with_default(options, at::kLong)},
               detail::stream_op("aten::random_", "from", {low, high}));
}

DTensor randperm(int64_t n, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  const at::Generator generator = generator_for(std::nullopt, mesh);
  return cut({"randperm", {}, mesh, placements, with_default(options, at::kLong)},
             [&](const at::TensorOptions& plain) { return at::randperm(n, generator, plain); });
}

DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return cut({"arange", {}, mesh, placements, options},
             [&](const at::TensorOptions& plain) { return at::arange(end, plain); });
}

DTensor eye(int64_t n, const DeviceMesh& mesh, const Placements& placements, at::TensorOptions options) {
  return cut({"eye", {}, mesh, placements, options}, [&](const at::TensorOptions& plain) { return at::eye(n, plain); });
}

}  // namespace serried
