// Greedy, and checked before anything depends on it.
#include "serried/parallel/zero/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "serried/base/error.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/parts.h"

namespace serried::detail {
namespace {

// One line per parameter: "f32[4,3] in group 0".
std::string lines_of(const ParamGroups& groups) {
  std::string lines;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& parameter : groups[g].params()) {
      lines += c10::str(watch::describe_tensor(parameter), " in group ", g, "\n");
    }
  }
  return lines;
}

}  // namespace

void ZeroPartition::give(const at::Tensor& parameter) {
  const auto least = std::min_element(num_bytes_.begin(), num_bytes_.end());
  *least += int64_t(parameter.nbytes());
  owners_[parameter.unsafeGetTensorImpl()] = int(least - num_bytes_.begin());
}

std::vector<at::Tensor> ZeroPartition::extend(const ParamGroups& groups) {
  std::vector<at::Tensor> added;
  for (const auto& group : groups) {
    std::vector<at::Tensor> fresh;
    for (const at::Tensor& parameter : group.params()) {
      if (owner_of(parameter.unsafeGetTensorImpl()) < 0) fresh.push_back(parameter);
    }
    added.insert(added.end(), fresh.begin(), fresh.end());
    // Stable: equal sizes stay in the order of the group, which is the same on all ranks.
    std::stable_sort(fresh.begin(), fresh.end(),
                     [](const at::Tensor& a, const at::Tensor& b) { return a.nbytes() > b.nbytes(); });
    for (const at::Tensor& parameter : fresh) give(parameter);
  }
  return added;
}

int ZeroPartition::owner_of(const void* parameter) const {
  const auto found = owners_.find(parameter);
  return found == owners_.end() ? -1 : found->second;
}

ParamGroups ZeroPartition::part_of(int rank, const ParamGroups& groups) const {
  ParamGroups part;
  for (const auto& group : groups) {
    std::vector<at::Tensor> owned;
    for (const at::Tensor& parameter : group.params()) {
      if (owner_of(parameter.unsafeGetTensorImpl()) == rank) owned.push_back(parameter);
    }
    part.emplace_back(std::move(owned), group.options().clone());
  }
  return part;
}

size_t num_parameters(const ParamGroups& groups) {
  size_t count = 0;
  for (const auto& group : groups) count += group.params().size();
  return count;
}

void copy_options(const ParamGroups& from, ParamGroups& to) {
  for (size_t g = 0; g < from.size(); ++g) to[g].set_options(from[g].options().clone());
}

void remove_repeats(ParamGroups& groups) {
  std::unordered_map<const void*, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<at::Tensor> once;
    for (const at::Tensor& parameter : groups[g].params()) {
      const auto [found, is_new] = group_of.emplace(parameter.unsafeGetTensorImpl(), g);
      if (is_new) once.push_back(parameter);
      if (found->second == g) continue;
      raise<c10::ValueError>({kZero,
                              c10::str("a parameter ", watch::describe_tensor(parameter), " stands in group ",
                                       found->second, " and in group ", g),
                              "put it into one group: it can have one learning rate only"});
    }
    groups[g].params() = std::move(once);
  }
}

void check_plain(const ParamGroups& groups) {
  int64_t index = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (const SpecPtr spec = spec_of(parameter)) {
        raise<c10::ValueError>({kZero, c10::str("parameter ", index, " is a DTensor, ", spec->to_string()),
                                "give DTensors to an ordinary optimizer, whose state lies as they do: Shard(0) over "
                                "the mesh spreads both"});
      }
      ++index;
    }
  }
}

void check_same_on_all_ranks(const ParamGroups& groups, const Group& group) {
  // "parameter 3 is f32[4,3] in group 0 on rank 0 and f32[4,2] in group 0 on rank 2"
  if (const auto found = first_difference(lines_of(groups), group)) {
    raise<c10::ValueError>({kZero,
                            c10::str("parameter ", found->line, " is ", found->first.value_or("missing"),
                                     " on rank 0 and ", found->other.value_or("missing"), " on rank ", found->rank),
                            "pass the parameters of the same module, in the same order, on every rank"});
  }
  if (num_parameters(groups) > 0) return;
  raise<c10::ValueError>({kZero, "there are no parameters", "pass module->parameters()"});
}

}  // namespace serried::detail
