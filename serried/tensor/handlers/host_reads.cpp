// Ops that give the host a value: numbers, truths, comparisons. Every rank of the mesh calls them and gets the same.
#include <ATen/ATen.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/making/placing.h"

namespace serried {
namespace {

using detail::LocalOnly;
using detail::OpCall;
using torch::jit::Stack;

bool run_item(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const LocalOnly guard;
  const watch::PartOf scope("item()");
  return detail::finish(op, stack, {detail::whole_local(*dtensor_meta(call.argument(0).toTensor())).item()});
}

// What the first tensor lies by, with Partial reduced: the second is brought there, so each rank compares its part.
bool parts_are_equal(const DTensorMeta& self, const DTensorMeta& other) {
  const Placements placements = without_partial(self.spec->placements);
  const LocalOnly guard;
  const bool here = at::equal(detail::local_as(self, placements), detail::local_as(other, placements));
  const at::Tensor everywhere = at::full({1}, int64_t(here), at::kLong);
  all_reduce_(everywhere, detail::whole_group(self.spec->mesh), c10d::ReduceOp::MIN);
  return everywhere.item<int64_t>() != 0;
}

bool run_equal(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const DTensorMeta* self = dtensor_meta(call.argument(0).toTensor());
  const DTensorMeta* other = dtensor_meta(call.argument(1).toTensor());
  if (self == nullptr || other == nullptr) return false;
  const watch::PartOf scope("equal()");
  if (self->spec->sizes != other->spec->sizes) return detail::finish(op, stack, {false});
  return detail::finish(op, stack, {parts_are_equal(*self, *other)});
}

bool run_allclose(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const watch::PartOf scope("allclose()");
  const at::Tensor close = at::isclose(call.argument(0).toTensor(), call.argument(1).toTensor(),
                                       call.number("rtol", 1e-5), call.number("atol", 1e-8), call.flag("equal_nan"));
  return detail::finish(op, stack, {at::all(close).item<bool>()});
}

bool run_is_same_size(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  return detail::finish(op, stack, {call.argument(0).toTensor().sizes() == call.argument(1).toTensor().sizes()});
}

bool run_is_pinned(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const LocalOnly guard;
  return detail::finish(op, stack, {dtensor_meta(call.argument(0).toTensor())->local.is_pinned()});
}

}  // namespace

std::vector<HandlerEntry> host_read_handlers() {
  return {
      {"aten::_local_scalar_dense", run_item}, {"aten::allclose", run_allclose},         {"aten::equal", run_equal},
      {"aten::is_pinned", run_is_pinned},      {"aten::is_same_size", run_is_same_size},
  };
}

}  // namespace serried
