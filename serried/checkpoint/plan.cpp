// Who writes what: from what the ranks have together to tensors in files.
#include "serried/checkpoint/plan.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/holders.h"
#include "serried/checkpoint/keep.h"
#include "serried/checkpoint/runs.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

// What of an item this rank writes, and with whom it shares that.
PlannedTensor planned(const SharedItem& item, const Collected& all, int rank) {
  PlannedTensor result{.entry = item.entry, .name = item.name, .dtype = item.dtype, .sizes = item.sizes, .replica = -1};
  const auto mine =
      std::find_if(item.held.begin(), item.held.end(), [&](const HeldBy& held) { return held.rank == rank; });
  if (mine == item.held.end()) return result;
  result.tensor = all.item(mine->number).item.tensor;
  result.spec = all.item(mine->number).spec;
  if (result.spec && result.spec->mesh.contains_this_rank()) result.rows = rows_instead(*result.spec);
  if (mine->part == kHoldsNothing) return result;
  const auto has_same = [&](const HeldBy& held) { return held.part == mine->part; };
  const auto number = std::count_if(item.held.begin(), mine, has_same);
  if (item.holder == Holder::first) {
    result.replica = number == 0 ? 0 : -1;
    return result;
  }
  result.replica = number;
  result.num_replicas = number + std::count_if(mine, item.held.end(), has_same);
  return result;
}

// Of parameters that several ranks own all know the same.
void join_owned(json& all, const json& more, const std::string& entry) {
  for (const auto& [name, value] : more.items()) {
    const auto [known, is_new] = all.emplace(name, value);
    if (is_new || *known == value) continue;
    fail(c10::str("the state of \"", entry, ".", name, "\" is ", value.dump(), " on one rank, and ", known->dump(),
                  " on another that has a copy"),
         "let ranks that have copies take the same steps");
  }
}

// What each rank alone knows, as one value of the checkpoint.
void add_values(SavePlan& plan, const json& values_of_all, const Shared& shared) {
  plan.index.values = values_of_all;
  for (const auto& [entry, values] : shared.entry_values.items()) {
    IndexedEntry& indexed = plan.index.entries[entry];
    indexed.values = values;
    const auto aliases = shared.aliases.find(entry);
    if (aliases != shared.aliases.end()) indexed.aliases = aliases->second;
    for (const json& message : shared.messages) {
      const json& owned = message["entry_owned"];
      if (owned.contains(entry)) join_owned(indexed.values["owned"], owned[entry], entry);
      const json& per_rank = message["per_rank"];
      if (!per_rank.contains(entry)) continue;
      if (indexed.per_rank.is_null()) indexed.per_rank = json::array();
      indexed.per_rank.push_back(per_rank[entry]);
    }
    // One for all where ranks agree: any number of them can load that.
    const json& list = indexed.per_rank;
    const bool agree =
        list.is_array() && std::all_of(list.begin(), list.end(), [&](const json& v) { return v == list[0]; });
    if (agree) indexed.per_rank = json::array({json(list[0])});
    if (list.is_array() && list.size() > 1 && list.size() != shared.messages.size()) {
      fail(c10::str("\"", entry, "\" is saved by ", list.size(), " of ", shared.messages.size(),
                    " ranks, and each has its own"),
           "save it on every rank, or none");
    }
  }
}

void check_names_differ(const SavePlan& plan) {
  std::unordered_set<std::string> seen;
  for (const PlannedTensor& tensor : plan.tensors) {
    if (tensor.name == "__metadata__" || tensor.name.empty()) {
      fail(c10::str("a tensor of \"", tensor.entry, "\" has the name \"", tensor.name, "\""), "give it another name");
    }
    if (seen.insert(tensor.entry + "/" + tensor.name).second) continue;
    fail(c10::str("two tensors of \"", tensor.entry, "\" have the name \"", tensor.name, "\""),
         "give them different names");
  }
}

}  // namespace

SavePlan make_plan(const Contents& contents, const Ranks& ranks, const SaveOptions& options) {
  Collected all;
  const auto tell = [&] {
    check_keep(options);
    all = collect(contents, ranks);
    return message_of(all);
  };
  const Shared shared = shared_of(all, ranks.together(tell), ranks);
  SavePlan plan;
  plan.index.world_size = ranks.size();
  for (const SharedItem& item : shared.items) plan.tensors.push_back(planned(item, all, ranks.rank()));
  add_values(plan, all.values, shared);
  check_names_differ(plan);
  lay_out(plan, shared.aliases);
  // What ranks move between them comes in the same order on all of them.
  const bool moves = std::any_of(plan.tensors.begin(), plan.tensors.end(),
                                 [](const PlannedTensor& tensor) { return !tensor.rows.empty(); });
  if (!moves) plan.first_file = plan.files.size() * size_t(ranks.rank()) / size_t(ranks.size());
  return plan;
}

}  // namespace serried::checkpoint::detail
