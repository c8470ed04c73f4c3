// Placements of per-channel tensors, derived from those of a batch.
#include "serried/tensor/handlers/batch_layout.h"

#include "serried/tensor/making/like.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

constexpr int64_t kChannels = 1;

}  // namespace

BatchLayout::BatchLayout(const at::Tensor& input) {
  const Spec& given = *dtensor_meta(input)->spec;
  spec_ = with_placements(given, without_partial(given.placements));
  for (const Placement& placement : spec_->placements) {
    cuts_batch_ = cuts_batch_ || (placement.is_shard() && placement.dim() != kChannels);
  }
  const c10::DimVector here = spec_->local_sizes();
  count_ = count_here_ = 1;
  for (size_t d = 0; d < here.size(); ++d) {
    if (d == kChannels) continue;
    reduced_dims_.push_back(int64_t(d));
    count_ *= double(spec_->sizes[d]);
    count_here_ *= double(here[d]);
  }
}

at::Tensor BatchLayout::local(const at::Tensor& t) const {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta != nullptr) return redistribute_local(meta->local, *meta->spec, spec_->placements).contiguous();
  const SpecPtr whole = spec_like(t, Placements(spec_->placements.size()));
  return redistribute_local(t, *whole, spec_->placements).contiguous();
}

at::Tensor BatchLayout::local_channels(const at::Tensor& t) const {
  if (!t.defined()) return t;
  const DTensorMeta* meta = dtensor_meta(t);
  const Placements to = channel_placements(0);
  if (meta != nullptr) return redistribute_local(meta->local, *meta->spec, to);
  return redistribute_local(t, *spec_like(t, Placements(to.size())), to);
}

at::Tensor BatchLayout::sum_over_ranks(const at::Tensor& local) const {
  const Placements reduced = channel_placements(local.dim() - 1);
  Placements pending = reduced;
  for (size_t axis = 0; axis < pending.size(); ++axis) {
    const Placement& of_input = spec_->placements[axis];
    if (of_input.is_shard() && of_input.dim() != kChannels) pending[axis] = Partial(ReduceKind::sum);
  }
  return redistribute_local(local, *spec_like(local, pending), reduced);
}

at::Tensor BatchLayout::whole_channels(const at::Tensor& local) const {
  return redistribute_local(local, *spec_like(local, channel_placements(0)), Placements(spec_->placements.size()));
}

at::Tensor BatchLayout::wrap_input(const at::Tensor& local) const {
  return wrap(local, spec_of_result(local, spec_->mesh, spec_->placements, spec_->sizes));
}

at::Tensor BatchLayout::wrap_channels(const at::Tensor& local) const {
  return wrap(local, spec_like(local, channel_placements(0)));
}

at::Tensor BatchLayout::wrap_whole(const at::Tensor& local) const {
  return wrap(local, spec_like(local, Placements(spec_->placements.size())));
}

// Of a tensor whose cut dim, if any, are the channels.
SpecPtr BatchLayout::spec_like(const at::Tensor& local, const Placements& placements) const {
  c10::DimVector sizes(local.sizes());
  for (const Placement& placement : placements) {
    if (placement.is_shard()) sizes[size_t(placement.dim())] = spec_->sizes[kChannels];
  }
  return spec_of_result(local, spec_->mesh, placements, sizes);
}

Placements BatchLayout::channel_placements(int64_t dim) const {
  Placements placements(spec_->placements.size());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const Placement& of_input = spec_->placements[axis];
    if (!of_input.is_shard(kChannels)) continue;
    placements[axis] = of_input.along(dim);
  }
  return placements;
}

}  // namespace serried::detail
