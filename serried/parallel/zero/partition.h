// Which rank updates which parameter, the same on all ranks.
#pragma once

#include <torch/optim/optimizer.h>

#include <unordered_map>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::detail {

inline constexpr const char* kZero = "ZeroRedundancyOptimizer";  // where its errors say they come from

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

class ZeroPartition {
 public:
  explicit ZeroPartition(int world_size) : num_bytes_(size_t(world_size), 0) {}

  /// Gives each parameter that has no owner yet to a rank: group by group, the largest first, to the rank that has the
  /// fewest bytes. Returns those parameters. Owners never change, so a group added later goes where it had gone at
  /// once.
  std::vector<at::Tensor> extend(const ParamGroups& groups);

  /// -1 where it has none.
  int owner_of(const void* parameter) const;

  /// The groups with the parameters of `rank` only; a group may be empty, so that indices stay the same.
  ParamGroups part_of(int rank, const ParamGroups& groups) const;

 private:
  void give(const at::Tensor& parameter);

  std::unordered_map<const void*, int> owners_;  // by TensorImpl
  std::vector<int64_t> num_bytes_;               // per rank
};

size_t num_parameters(const ParamGroups& groups);

/// Gives each group of `to` the options of its counterpart.
void copy_options(const ParamGroups& from, ParamGroups& to);

/// Takes out what stands twice in a group, as the weight of tied modules does; ValueError where two groups share one.
void remove_repeats(ParamGroups& groups);

/// ValueError for a DTensor: where it is sharded its state is, too, and to give away whole parts of it makes no sense.
void check_plain(const ParamGroups& groups);

/// ValueError on every rank, naming two of them, if groups, shapes or dtypes differ, or if there is no parameter.
void check_same_on_all_ranks(const ParamGroups& groups, const Group& group);

}  // namespace serried::detail
