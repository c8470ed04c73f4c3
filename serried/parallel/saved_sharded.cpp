// Cuts what is saved, and gathers it where backward asks.
#include "serried/parallel/saved_sharded.h"

#include <unordered_map>
#include <utility>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/saved_tensors.h"
#include "serried/tensor/weak_tensor.h"

namespace serried {
namespace {

/// One activation, shared by all nodes that save it.
struct SavedPart {
  DTensor part;
  Placements placements;   // of the whole
  c10::DimVector strides;  // of what this rank had of it

  at::Tensor gather() const;
};

// In the layout it had: kernels add in another order where strides differ.
at::Tensor SavedPart::gather() const {
  const DTensor whole = part.redistribute(placements);
  const DTensorMeta& meta = *dtensor_meta(whole);
  if (meta.local.strides() == c10::IntArrayRef(strides)) return whole;
  const at::Tensor local = meta.local.new_empty_strided(meta.local.sizes(), strides).copy_(meta.local);
  return wrap(local, spec_of_result(local, meta.spec->mesh, placements, whole.sizes()));
}

class PartKeeper final : public detail::TensorKeeper {
 public:
  PartKeeper(const DeviceMesh& mesh, int64_t dim, SavedShardedOptions options)
      : mesh_(mesh), dim_(dim), options_(options) {}

  detail::SavedHooks make_hooks() override;
  /// Null where `t` stays as it is.
  std::shared_ptr<const SavedPart> part_of(const at::Tensor& t);

 private:
  struct Known {
    WeakTensor tensor;  // keeps the address from being used again
    int64_t version;
    std::weak_ptr<const SavedPart> part;
  };

  int64_t axis_of(const DeviceMesh& mesh);
  std::shared_ptr<const SavedPart> cut(const at::Tensor& t, const DTensorMeta& meta, int64_t axis, int64_t dim);

  const DeviceMesh mesh_;
  const int64_t dim_;
  const SavedShardedOptions options_;
  std::unordered_map<uint64_t, int64_t> axes_;  // of meshes met: which one is ours, -1 for none
  std::unordered_map<const c10::TensorImpl*, Known> known_;
};

class PartHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PartHooks(PartKeeper& keeper) : keeper_(&keeper) {}

  void call_pack_hook(const at::Tensor& t) override {
    part_ = std::exchange(keeper_, nullptr)->part_of(t);
    if (part_ != nullptr) return;
    whole_ = t.is_leaf() ? t : t.tensor_data();
    version_ = t._version();
  }

  at::Tensor call_unpack_hook() override {
    if (part_ != nullptr) return part_->gather();
    if (whole_._version() != version_) {
      raise<c10::Error>({"SavedSharded",
                         c10::str("a tensor that autograd saved, ", watch::describe_tensor(whole_),
                                  ", has been changed by an in-place operation since: it is at version ",
                                  whole_._version(), ", expected version ", version_),
                         "change it after backward, or change a copy: x = x.add(y)"});
    }
    return whole_;
  }

 private:
  PartKeeper* keeper_;  // until it has packed: the graph outlives the scope
  std::shared_ptr<const SavedPart> part_;
  at::Tensor whole_;
  int64_t version_ = 0;
};

detail::SavedHooks PartKeeper::make_hooks() {
  return std::make_unique<PartHooks>(*this);
}

int64_t find_axis(const DeviceMesh& whole, const DeviceMesh& axis) {
  if (whole == axis) return 0;
  for (int64_t i = 0; i < int64_t(whole.dim_names().size()) && whole.ndim() > 1; ++i) {
    if (whole[whole.dim_names()[size_t(i)]] == axis) return i;
  }
  return -1;
}

int64_t PartKeeper::axis_of(const DeviceMesh& mesh) {
  const auto [found, is_new] = axes_.try_emplace(mesh.id(), -1);
  if (is_new) found->second = find_axis(mesh, mesh_);
  return found->second;
}

std::shared_ptr<const SavedPart> PartKeeper::part_of(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr || mesh_.size() == 1 || t.is_leaf() || !meta->local.is_non_overlapping_and_dense())
    return nullptr;
  const int64_t dim = dim_ < 0 ? dim_ + t.dim() : dim_;
  if (dim < 0 || dim >= t.dim() || t.size(dim) < mesh_.size()) return nullptr;
  if (int64_t(t.numel() * t.element_size()) < options_.min_bytes) return nullptr;
  const int64_t axis = axis_of(meta->spec->mesh);
  if (axis < 0 || !meta->spec->placements[size_t(axis)].is_replicate()) return nullptr;
  for (const Placement& placement : meta->spec->placements) {
    if (placement.is_partial() || placement.is_shard(dim)) return nullptr;
  }
  return cut(t, *meta, axis, dim);
}

// A tensor that several nodes save is cut once.
std::shared_ptr<const SavedPart> PartKeeper::cut(const at::Tensor& t, const DTensorMeta& meta, int64_t axis,
                                                 int64_t dim) {
  const auto known = known_.find(t.unsafeGetTensorImpl());
  if (known != known_.end() && known->second.version == t._version()) {
    if (auto part = known->second.part.lock()) return part;
  }
  constexpr size_t kManyKnown = 256;
  if (known_.size() > kManyKnown) std::erase_if(known_, [](const auto& each) { return each.second.part.expired(); });
  Placements placements = meta.spec->placements;
  placements[size_t(axis)] = Shard(dim);
  const auto part = std::make_shared<const SavedPart>(SavedPart{
      DTensor(t.tensor_data()).redistribute(placements), meta.spec->placements, c10::DimVector(meta.local.strides())});
  known_.insert_or_assign(t.unsafeGetTensorImpl(), Known{t, t._version(), part});
  return part;
}

void check_mesh(const DeviceMesh& mesh) {
  if (mesh.ndim() != 1) {
    raise<c10::ValueError>({"SavedSharded", c10::str(mesh.to_string(), " has ", mesh.ndim(), " axes"),
                            "pass the axis over which activations are whole: mesh[\"tp\"]"});
  }
  if (!mesh.contains_this_rank()) {
    raise<c10::ValueError>({"SavedSharded", c10::str("rank ", mesh.get_rank(), " is not in ", mesh.to_string()),
                            "open the scope on the ranks of the mesh only: if (mesh.contains_this_rank())"});
  }
}

}  // namespace

struct SavedSharded::Impl {
  Impl(const DeviceMesh& mesh, int64_t dim, SavedShardedOptions options)
      : keeper(std::make_unique<PartKeeper>(mesh, dim, options)), scope("SavedSharded", keeper.get()) {}

  const std::unique_ptr<detail::TensorKeeper> keeper;
  const detail::KeeperScope scope;
};

SavedSharded::SavedSharded(const DeviceMesh& mesh, int64_t dim, SavedShardedOptions options) {
  check_mesh(mesh);
  impl_ = std::make_unique<Impl>(mesh, dim, options);
}

SavedSharded::~SavedSharded() = default;

}  // namespace serried
