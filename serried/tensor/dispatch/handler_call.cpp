// Local tensors for handlers.
#include "serried/tensor/dispatch/handler_call.h"

#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {

at::Tensor local_as(const DTensorMeta& meta, const Placements& to) {
  return meta.spec->placements == to ? meta.local : redistribute_local(meta.local, *meta.spec, to);
}

at::Tensor whole_local(const DTensorMeta& meta) {
  return local_as(meta, Placements(meta.spec->placements.size()));
}

}  // namespace serried::detail
