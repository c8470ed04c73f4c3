// Values of an entry that ranks have different parts of: those of optimizers are joined, parameter by parameter, and
// those of samplers.
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr const char* kFix =
    "give parameters that several ranks have the same options and the same steps on all of them; parameters that are "
    "no "
    "copies need names of their own";

// A parameter as the first rank that lists it has it.
struct Known {
  int rank;
  json sizes, options, state;
};

class OptimizerJoiner {
 public:
  explicit OptimizerJoiner(const std::string& entry) : entry_(entry) {}

  void add(int rank, const json& values) {
    const json& groups = values.at("groups");
    for (size_t g = 0; g < groups.size(); ++g) add_group(rank, g, groups[g], values.at("owned"));
    for (const auto& [name, state] : values.at("owned").items()) owned_.emplace(name, state);
    for (const json& entry : values.at("entries")) entries_.insert(entry.get<std::string>());
    const json aliases = values.value("aliases", json::object());
    for (const auto& [alias, name] : aliases.items()) aliases_.emplace(alias, name.get<std::string>());
  }

  json result(const json& type) && {
    // What is another name on one rank has a state of its own where another rank has only that name.
    std::erase_if(aliases_, [&](const auto& alias) { return known_.contains(alias.first); });
    return {{"type", type}, {"groups", groups_}, {"entries", entries_}, {"aliases", aliases_}, {"owned", owned_}};
  }

 private:
  void add_group(int rank, size_t number, const json& group, const json& owned) {
    json names = json::array(), sizes = json::array();
    for (size_t i = 0; i < group.at("params").size(); ++i) {
      const auto name = group.at("params")[i].get<std::string>();
      Known mine{rank, group.at("sizes")[i], group.at("options"), owned.value(name, json())};
      const auto [known, is_new] = known_.emplace(name, mine);
      if (!is_new) {
        compare(name, known->second, mine);
        continue;
      }
      names.push_back(name);
      sizes.push_back(mine.sizes);
    }
    if (names.empty() && !group.at("params").empty()) return;
    json& to = group_for(number, group.at("options"));
    to["params"].insert(to["params"].end(), names.begin(), names.end());
    to["sizes"].insert(to["sizes"].end(), sizes.begin(), sizes.end());
  }

  // Groups of one number and of the same options are parts of one.
  json& group_for(size_t number, const json& options) {
    for (size_t i = 0; i < groups_.size(); ++i) {
      if (numbers_[i] == number && groups_[i].at("options") == options) return groups_[i];
    }
    numbers_.push_back(number);
    groups_.push_back({{"params", json::array()}, {"sizes", json::array()}, {"options", options}});
    return groups_.back();
  }

  void compare(const std::string& name, const Known& first, const Known& other) const {
    const auto refuse = [&](const char* what, const json& theirs, const json& mine) {
      if (theirs == mine) return;
      fail(c10::str("ranks save different things: \"", entry_, ".", name, "\" has the ", what, " ", theirs.dump(),
                    " on rank ", first.rank, ", and ", mine.dump(), " on rank ", other.rank),
           kFix);
    };
    refuse("sizes", first.sizes, other.sizes);
    refuse("options", first.options, other.options);
    refuse("state", first.state, other.state);
  }

  const std::string& entry_;
  std::map<std::string, Known> known_;
  std::set<std::string> entries_;
  std::map<std::string, std::string> aliases_;
  json groups_ = json::array(), owned_ = json::object();
  std::vector<size_t> numbers_;
};

// Of samplers that repeat no sample the last ranks come to their end one round earlier.
std::optional<json> joined_samplers(const std::vector<std::pair<int, json>>& of_ranks) {
  const json& first = of_ranks[0].second;
  if (std::all_of(of_ranks.begin(), of_ranks.end(), [&](const auto& each) { return each.second == first; })) return {};
  std::optional<int64_t> goes_on;  // what ranks that are not at their end say
  int64_t last = 0;
  for (const auto& [rank, values] : of_ranks) {
    if (!values.is_object() || !values.contains("sampler_epoch")) return std::nullopt;
    for (const char* key : {"sampler_epoch", "samples", "seed"}) {
      if (values.at(key) != first.at(key)) return std::nullopt;
    }
    const auto consumed = values.at("consumed").get<int64_t>();
    last = std::max(last, consumed);
    if (values.at("is_at_end").get<bool>()) continue;
    if (goes_on.value_or(consumed) != consumed) return std::nullopt;
    goes_on = consumed;
  }
  if (goes_on && last > *goes_on) return std::nullopt;
  json joined = first;
  joined["consumed"] = goes_on.value_or(first.at("samples").get<int64_t>());
  joined["is_at_end"] = !goes_on;
  return joined;
}

}  // namespace

json joined_values(const std::string& entry, const std::vector<std::pair<int, json>>& of_ranks) {
  const auto& [first_rank, first] = of_ranks[0];
  if (const std::optional<json> sampler = joined_samplers(of_ranks)) return *sampler;
  const bool is_optimizer = first.is_object() && first.contains("groups");
  OptimizerJoiner joiner(entry);
  for (const auto& [rank, values] : of_ranks) {
    const bool is_same_kind = is_optimizer && values.is_object() && values.value("type", json()) == first.at("type");
    if (values != first && !is_same_kind) {
      fail(c10::str("ranks save different things: rank ", first_rank, " has ", entry, " = ", first.dump(), ", rank ",
                    rank, " has ", entry, " = ", values.dump()),
           "save the same values on every rank");
    }
    if (is_optimizer) joiner.add(rank, values);
  }
  return is_optimizer ? std::move(joiner).result(first.at("type")) : first;
}

}  // namespace serried::checkpoint::detail
