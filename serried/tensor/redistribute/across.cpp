// From one mesh to another of the same root group: every rank sends what others will hold of its part.
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "serried/base/error.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/redistribute/exchange.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using detail::PartBoxes;

void check_same_root(const DeviceMesh& from, const DeviceMesh& to) {
  if (from.root_group() == to.root_group()) return;
  raise<c10::ValueError>({"redistribute",
                          c10::str(from.to_string(), " is over group \"", from.root_group()->getGroupName(), "\" and ",
                                   to.to_string(), " over \"", to.root_group()->getGroupName(), "\""),
                          "make both meshes over one group: {.group = world}"});
}

// The ranks of both meshes, ascending, and the group of them. Made by those ranks alone, once.
struct Union {
  std::vector<int> ranks;
  Group group;
  int64_t rank = 0;  // this one's, in the group

  int64_t index(int64_t root_rank) const {
    return std::lower_bound(ranks.begin(), ranks.end(), int(root_rank)) - ranks.begin();
  }
};

// Groups of unions, kept while their root lives. A root belongs to one rank, so only that rank's threads look here for
// it, and making a group, which waits for other ranks, happens outside the lock.
class UnionGroups {
 public:
  Group find(const Group& root, const std::vector<int>& ranks) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(made_, [](const auto& entry) { return entry.second.root.expired(); });
      const auto found = made_.find({root.get(), ranks});
      if (found != made_.end()) return found->second.group;
    }
    Group group = root->splitGroup(ranks, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    const std::lock_guard<std::mutex> lock(mutex_);
    made_.insert_or_assign(std::pair(root.get(), ranks),
                           Made{c10::weak_intrusive_ptr<c10d::ProcessGroup>(root), group});
    return group;
  }

 private:
  struct Made {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> root;
    Group group;
  };
  std::mutex mutex_;
  std::map<std::pair<c10d::ProcessGroup*, std::vector<int>>, Made> made_;
};

Group group_of(const Group& root, const std::vector<int>& ranks) {
  if (int(ranks.size()) == root->getSize()) return root;
  static UnionGroups groups;
  return groups.find(root, ranks);
}

Union union_of(const DeviceMesh& from, const DeviceMesh& to) {
  Union both;
  both.ranks.assign(from.rank_list().begin(), from.rank_list().end());
  both.ranks.insert(both.ranks.end(), to.rank_list().begin(), to.rank_list().end());
  std::sort(both.ranks.begin(), both.ranks.end());
  both.ranks.erase(std::unique(both.ranks.begin(), both.ranks.end()), both.ranks.end());
  const Group& root = from.root_group();
  if (!std::binary_search(both.ranks.begin(), both.ranks.end(), root->getRank())) {
    raise<c10::ValueError>(
        {"redistribute",
         c10::str("rank ", root->getRank(), " is in neither ", from.to_string(), " nor ", to.to_string()),
         "call it on the ranks of the two meshes only"});
  }
  both.group = group_of(root, both.ranks);
  both.rank = both.index(root->getRank());
  return both;
}

// A mesh and how the tensor lies on it.
struct Side {
  const DeviceMesh& mesh;
  const Placements& placements;
  c10::IntArrayRef sizes;

  std::optional<int64_t> place(int64_t root_rank) const {
    const auto& ranks = mesh.rank_list();
    const auto found = std::find(ranks.begin(), ranks.end(), root_rank);
    if (found == ranks.end()) return std::nullopt;
    return found - ranks.begin();
  }
  PartBoxes part(int64_t place) const {
    const c10::DimVector coordinate = coordinate_of(place, mesh.shape());
    return PartBoxes(sizes, placements, {mesh.shape(), coordinate});
  }
};

// Which of several replicas serves a receiver: its own where it has one, else by turns.
bool serves(const Side& source, int64_t place, int64_t receiver) {
  const c10::DimVector at = coordinate_of(place, source.mesh.shape());
  const std::optional<int64_t> own = source.place(receiver);
  const c10::DimVector wanted = coordinate_of(own.value_or(receiver % source.mesh.size()), source.mesh.shape());
  for (size_t axis = 0; axis < at.size(); ++axis) {
    if (source.placements[axis].is_replicate() && at[axis] != wanted[axis]) return false;
  }
  return true;
}

detail::Exchange exchange_between(const Side& source, const Side& target, const Union& both) {
  const int64_t self = both.ranks[both.rank];
  const std::optional<int64_t> source_place = source.place(self);
  const std::optional<int64_t> target_place = target.place(self);
  detail::Exchange exchange;
  exchange.sizes.assign(source.sizes.begin(), source.sizes.end());
  std::optional<PartBoxes>& mine = exchange.source;
  std::optional<PartBoxes>& wanted = exchange.target;
  if (source_place) mine = source.part(*source_place);
  if (target_place) wanted = target.part(*target_place);
  exchange.sends.resize(both.ranks.size());
  exchange.receives.resize(both.ranks.size());
  for (size_t peer = 0; peer < both.ranks.size(); ++peer) {
    const int64_t rank = both.ranks[peer];
    const std::optional<int64_t> peer_target = target.place(rank);
    if (mine && peer_target && serves(source, *source_place, rank)) {
      exchange.sends[peer] = detail::common_boxes(*mine, target.part(*peer_target));
    }
    const std::optional<int64_t> peer_source = source.place(rank);
    if (wanted && peer_source && serves(source, *peer_source, self)) {
      exchange.receives[peer] = detail::common_boxes(source.part(*peer_source), *wanted);
    }
  }
  return exchange;
}

// As far as `started` says: this rank's part on `mesh` with nothing left to reduce. Undefined where it has none.
at::Tensor move_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh, const Placements& target,
                       detail::StartedStep* started) {
  check_same_root(from.mesh, mesh);
  const Union both = union_of(from.mesh, mesh);
  const Placements source = without_partial(from.placements);
  const at::Tensor reduced = from.mesh.contains_this_rank() ? redistribute_local(local, from, source) : local;
  at::TensorOptions options = at::TensorOptions(from.dtype).device(c10::Device(mesh.device_type()));
  if (local.defined()) options = local.options();
  return detail::exchange_boxes(reduced, both.group,
                                exchange_between({from.mesh, source, from.sizes}, {mesh, target, from.sizes}, both),
                                options, started);
}

}  // namespace

at::Tensor redistribute_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh,
                               const Placements& to) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Placements target = without_partial(to);
  at::Tensor moved = move_across(local, from, mesh, target, nullptr);
  if (!moved.defined() || target == to) return moved;
  return redistribute_local(moved, *intern_spec(mesh, target, from.sizes, from.strides, from.dtype), to);
}

StartedRedistribution start_redistribution_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh,
                                                  const Placements& to) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Placements target = without_partial(to);
  detail::StartedStep started;
  const at::Tensor moved = move_across(local, from, mesh, target, &started);
  const SpecPtr arriving = intern_spec(mesh, target, from.sizes, from.strides, from.dtype);
  return {moved, started.work, [moved, arriving, to, after = std::move(started.after)] {
            const at::AutoDispatchBelowADInplaceOrView as_above;
            if (after) after();
            return moved.defined() ? redistribute_local(moved, *arriving, to) : moved;
          }};
}

}  // namespace serried
