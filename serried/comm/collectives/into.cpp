// The collectives that write into a given output: schemas, kernels, and the version count of the output.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/started.h"
#include "serried/comm/collectives/transport.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {
namespace {

using Into = void(const at::Tensor&, const at::Tensor&, const Group&);
using ReduceInto = void(const at::Tensor&, const at::Tensor&, const Group&, const ReduceOpPtr&);

void gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  const Started started("all_gather", x, group);
  Transport("all_gather_into", group, x).all_gather_flat(output, x);
}

void reduce_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const Started started("reduce_scatter", x, group);
  Transport("reduce_scatter_into", group, x).reduce_scatter_flat(output, x, *op);
}

void exchange_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  const Started started("all_to_all", x, group);
  Transport("all_to_all_into", group, x).all_to_all_flat(output, x);
}

void nothing(const at::Tensor&, const at::Tensor&, const Group&) {}
void nothing_reduced(const at::Tensor&, const at::Tensor&, const Group&, const ReduceOpPtr&) {}

/// The kernel above autograd: no gradient flows through a given output, and its version counts.
template <auto call, class... Args>
void written_into(const at::Tensor& output, const at::Tensor& x, const Group& group, Args... args) {
  if (c10::GradMode::is_enabled() && (output.requires_grad() || x.requires_grad())) {
    raise<c10::ValueError>({"collective into an output",
                            watch::describe_tensor(x.requires_grad() ? x : output) +
                                " requires grad, and writing into a given output has no gradient",
                            "use the functional form, or call it under torch::NoGradGuard"});
  }
  at::AutoDispatchBelowADInplaceOrView below;
  call(output, x, group, args...);
  torch::autograd::increment_version(output);
}

#define SERRIED_INTO "(Tensor(a!) output, Tensor x, __torch__.torch.classes.c10d.ProcessGroup group"

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("all_gather_into" SERRIED_INTO ") -> ()");
  m.def("all_to_all_into" SERRIED_INTO ") -> ()");
  m.def("reduce_scatter_into" SERRIED_INTO ", __torch__.torch.classes.c10d.ReduceOp op) -> ()");
}

#undef SERRIED_INTO

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("all_gather_into", gather_into);
  m.impl("all_to_all_into", exchange_into);
  m.impl("reduce_scatter_into", reduce_into);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  m.impl("all_gather_into", nothing);
  m.impl("all_to_all_into", nothing);
  m.impl("reduce_scatter_into", nothing_reduced);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  m.impl("all_gather_into", written_into<ops::all_gather_into>);
  m.impl("all_to_all_into", written_into<ops::all_to_all_into>);
  m.impl("reduce_scatter_into", written_into<ops::reduce_scatter_into, const ReduceOpPtr&>);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  m.impl("all_gather_into", written_into<ops::all_gather_into>);
  m.impl("all_to_all_into", written_into<ops::all_to_all_into>);
  m.impl("reduce_scatter_into", written_into<ops::reduce_scatter_into, const ReduceOpPtr&>);
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

namespace ops {

void all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  static const auto handle = find<Into>("serried::all_gather_into");
  handle.call(output, x, group);
}

void reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  static const auto handle = find<ReduceInto>("serried::reduce_scatter_into");
  handle.call(output, x, group, op);
}

void all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  static const auto handle = find<Into>("serried::all_to_all_into");
  handle.call(output, x, group);
}

}  // namespace ops

}  // namespace serried::detail
