// Values of an entry that ranks have different parts of: those of optimizers are joined, parameter by parameter.
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <map>

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
  }

  json result(const json& type) && { return {{"type", type}, {"groups", groups_}, {"owned", owned_}}; }

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
  json groups_ = json::array(), owned_ = json::object();
  std::vector<size_t> numbers_;
};

}  // namespace

json joined_values(const std::string& entry, const std::vector<std::pair<int, json>>& of_ranks) {
  const auto& [first_rank, first] = of_ranks[0];
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
