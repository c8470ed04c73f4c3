// DTensor: what a user asks of one.
#include "serried/tensor/dtensor.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <ostream>

#include "serried/base/error.h"
#include "serried/comm/collectives/pending.h"
#include "serried/comm/collectives/watch.h"
#include "serried/spmd/redistribute.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/making/unchecked.h"
#include "serried/tensor/making/gradient.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

const DTensorMeta& meta_of(const char* where, const at::Tensor& t) {
  if (const DTensorMeta* meta = dtensor_meta(t)) return *meta;
  raise<c10::ValueError>({where, "the DTensor is undefined", "assign one to it first"});
}

// The same for who reads the data.
const DTensorMeta& fresh_meta_of(const char* where, const at::Tensor& t) {
  const DTensorMeta& meta = meta_of(where, t);
  detail::check_fresh(where, "", meta);
  return meta;
}

using detail::Part;

// What is to be moved: the part in the dtype it travels in.
Part part_as(const DTensorMeta& meta, c10::ScalarType dtype) {
  const Spec& spec = *meta.spec;
  if (spec.dtype == dtype) return {meta.local, meta.spec};
  return {meta.local.to(dtype), intern_spec(spec.mesh, spec.placements, spec.sizes, spec.strides, dtype)};
}

at::Tensor wrapped(at::Tensor moved, const Part& from, const Placements& placements) {
  SpecPtr to = moved.is_same(from.local) ? with_placements(*from.spec, placements)
                                         : spec_of_result(moved, from.spec->mesh, placements, from.spec->sizes);
  return wrap(std::move(moved), std::move(to));
}

at::Tensor wrapped(at::Tensor moved, const Part& from, const DeviceMesh& mesh, const Placements& placements) {
  if (!moved.defined()) moved = at::empty({0}, from.local.options());  // this rank holds nothing of it
  const c10::DimVector strides = serried::contiguous_strides(from.spec->sizes);
  return wrap(std::move(moved), intern_spec(mesh, placements, from.spec->sizes, strides, from.spec->dtype));
}

// `t` placed by `placements`, as `dtype`; `t` itself where nothing changes.
at::Tensor redistributed(const at::Tensor& t, const Placements& placements, c10::ScalarType dtype) {
  const DTensorMeta& meta = *dtensor_meta(t);
  if (meta.spec->placements == placements && meta.spec->dtype == dtype) return t;
  const at::NoGradGuard no_grad;
  const Part from = part_as(meta, dtype);
  comm_debug::note_redistribution("redistribute", *from.spec, placements, /*implicit=*/false);
  return wrapped(redistribute_local(from.local, *from.spec, placements), from, placements);
}

at::Tensor redistributed_across(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements) {
  const DTensorMeta& meta = *dtensor_meta(t);
  const at::NoGradGuard no_grad;
  return wrapped(redistribute_across(meta.local, *meta.spec, mesh, placements), {meta.local, meta.spec}, mesh,
                 placements);
}

// What autograd needs of a redistribution: the way back, once more differentiable.
void record_way_back(const DTensor& from, const at::Tensor& to, std::optional<c10::ScalarType> backward_dtype,
                     std::optional<uint64_t> order = {}) {
  const SpecPtr spec = dtensor_meta(from)->spec;
  const auto backward = [spec, backward_dtype](const at::Tensor& grad) {
    const DTensor given(grad);
    const Placements placements = detail::gradient_placements(spec->placements);
    if (!(given.device_mesh() == spec->mesh)) return at::Tensor(given.redistribute(spec->mesh, placements));
    const c10::ScalarType dtype = backward_dtype.value_or(given.scalar_type());
    const DTensor moved = given.redistribute(placements, {.forward_dtype = dtype});
    return at::Tensor(moved.redistribute(placements, {.forward_dtype = spec->dtype}));
  };
  detail::record_gradient("RedistributeBackward", from, to, backward, order);
}

DTensor recorded(const DTensor& from, const at::Tensor& to, std::optional<c10::ScalarType> backward_dtype) {
  if (to.is_same(from)) return from;
  if (detail::wants_gradient(from)) record_way_back(from, to, backward_dtype);
  return DTensor(to);
}

// What the start says about the gradient of what arrives.
struct Gradient {
  std::optional<uint64_t> order;  // of the start, so that ranks may wait in different orders; none: no gradient
  std::optional<c10::ScalarType> dtype;
};

Gradient gradient_of(const DTensor& x, std::optional<c10::ScalarType> dtype) {
  return {detail::wants_gradient(x) ? std::optional(detail::place_in_order()) : std::nullopt, dtype};
}

// Whoever waits, the result is as the modes of the start have it.
Pending pending(const DTensor& x, StartedRedistribution moving, Gradient gradient,
                std::function<at::Tensor(at::Tensor)> wrap_moved) {
  const Pending arriving = detail::pending({moving.arriving, moving.work}, {"redistribute", x});
  return arriving.then([x, gradient, wrap_moved = std::move(wrap_moved), finish = std::move(moving.finish),
                        inference = c10::InferenceMode::is_enabled()](const at::Tensor&) {
    const c10::InferenceMode as_started(inference);
    const at::NoGradGuard no_grad;
    at::Tensor result = wrap_moved(finish());
    if (gradient.order.has_value()) record_way_back(x, result, gradient.dtype, gradient.order);
    return result;
  });
}

}  // namespace

bool is_dtensor(const at::Tensor& t) {
  return dtensor_meta(t) != nullptr;
}

DTensor::DTensor(at::Tensor t) : at::Tensor(std::move(t)) {
  if (is_dtensor(*this)) return;
  raise<c10::TypeError>({"DTensor",
                         defined() ? watch::describe_tensor(*this) + " is a plain tensor" : "the tensor is undefined",
                         "make one with distribute_tensor(full, mesh, placements) or DTensor::from_local"});
}

at::Tensor DTensor::to_local(ToLocalOptions options) const {
  const DTensorMeta& meta = fresh_meta_of("to_local", *this);
  at::Tensor part = detail::alias_of_local(meta.local, *this);
  if (!detail::wants_gradient(*this)) return part;
  const Placements placed =
      options.grad_placements.has_value()
          ? detail::resolved_placements("to_local", *options.grad_placements, dim(), meta.spec->mesh, scalar_type())
          : detail::gradient_placements(meta.spec->placements);
  detail::record_gradient("ToLocalBackward", *this, part, [spec = meta.spec, placed](const at::Tensor& grad) {
    const at::Tensor local = grad.contiguous();
    const SpecPtr grad_spec = spec_of_result(local, spec->mesh, placed, spec->sizes);
    return detail::from_local_unchecked(local, local, grad_spec, detail::gradient_placements(placed));
  });
  return part;
}

DTensor DTensor::redistribute(const Placements& placements, RedistributeOptions options) const {
  const Spec& spec = *fresh_meta_of("redistribute", *this).spec;
  const c10::ScalarType dtype = options.forward_dtype.value_or(spec.dtype);
  if (placements == spec.placements && dtype == spec.dtype) return *this;
  const Placements placed = detail::resolved_placements("redistribute", placements, dim(), spec.mesh, dtype);
  return recorded(*this, redistributed(*this, placed, dtype), options.backward_dtype);
}

DTensor DTensor::redistribute(const DeviceMesh& mesh, const Placements& placements) const {
  const Spec& spec = *fresh_meta_of("redistribute", *this).spec;
  if (mesh == spec.mesh) return redistribute(placements);
  const Placements placed = detail::resolved_placements("redistribute", placements, dim(), mesh, spec.dtype);
  return recorded(*this, redistributed_across(*this, mesh, placed), {});
}

Pending async::redistribute(const DTensor& x, const Placements& placements, RedistributeOptions options) {
  const DTensorMeta& meta = fresh_meta_of("redistribute", x);
  const c10::ScalarType dtype = options.forward_dtype.value_or(meta.spec->dtype);
  const Placements placed = detail::resolved_placements("redistribute", placements, x.dim(), meta.spec->mesh, dtype);
  if (placed == meta.spec->placements && dtype == meta.spec->dtype) return detail::pending({x, {}});
  const Gradient gradient = gradient_of(x, options.backward_dtype);
  const at::NoGradGuard no_grad;
  const Part from = part_as(meta, dtype);
  comm_debug::note_redistribution("redistribute", *from.spec, placed, /*implicit=*/false);
  return pending(x, start_redistribution(from.local, from.spec, placed), gradient,
                 [from, placed](at::Tensor moved) { return wrapped(std::move(moved), from, placed); });
}

Pending async::redistribute(const DTensor& x, const DeviceMesh& mesh, const Placements& placements) {
  const DTensorMeta& meta = fresh_meta_of("redistribute", x);
  if (mesh == meta.spec->mesh) return async::redistribute(x, placements);
  const Placements placed = detail::resolved_placements("redistribute", placements, x.dim(), mesh, meta.spec->dtype);
  const Gradient gradient = gradient_of(x, {});
  const at::NoGradGuard no_grad;
  const Part from{meta.local, meta.spec};
  return pending(x, start_redistribution_across(from.local, *from.spec, mesh, placed), gradient,
                 [from, mesh, placed](at::Tensor moved) { return wrapped(std::move(moved), from, mesh, placed); });
}

at::Tensor DTensor::full_tensor(ToLocalOptions options) const {
  const watch::PartOf scope("full_tensor()");
  const Spec& spec = *meta_of("full_tensor", *this).spec;
  return redistribute(Placements(spec.placements.size())).to_local(std::move(options));
}

const DeviceMesh& DTensor::device_mesh() const {
  return meta_of("device_mesh", *this).spec->mesh;
}

const Placements& DTensor::placements() const {
  return meta_of("placements", *this).spec->placements;
}

std::vector<DTensor::Chunk> DTensor::local_chunks() const {
  const Spec& spec = *meta_of("local_chunks", *this).spec;
  for (const Placement& placement : spec.placements) {
    if (!placement.is_partial()) continue;
    raise<c10::ValueError>({"local_chunks", spec.to_string() + " is Partial: no rank holds values of the whole",
                            "redistribute it to Replicate or Shard first"});
  }
  std::vector<Chunk> chunks;
  for (const spmd::Box& box : spmd::owned_boxes(spec.sizes, spec.placements, spec.mesh.position())) {
    Chunk& chunk = chunks.emplace_back();
    for (const Span& span : box) {
      chunk.offsets.push_back(span.begin);
      chunk.sizes.push_back(span.size);
    }
  }
  return chunks;
}

}  // namespace serried
