// Parameters by name, or by place with their sizes compared; options by parameter, never by the number of a group.
#include "serried/checkpoint/optimizer_match.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::sizes_text;

bool has_names(const NamedGroups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::any_of(group.begin(), group.end(), [](const NamedParameter& each) { return each.is_named; });
  });
}

bool has_names(const json& saved) {
  for (size_t g = 0; g < saved.size(); ++g) {
    const json& names = saved[g].at("params");
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] != name_by_place(g, i)) return true;
    }
  }
  return false;
}

bool have_same_counts(const NamedGroups& groups, const json& saved) {
  return std::equal(groups.begin(), groups.end(), saved.begin(), saved.end(),
                    [](const auto& mine, const json& theirs) { return mine.size() == theirs.at("params").size(); });
}

// A parameter as it was saved.
struct SavedParameter {
  std::string name;
  std::vector<int64_t> sizes;
  size_t group;
};

SavedParameter saved_parameter(const json& groups, size_t group, size_t number) {
  return {groups[group].at("params").at(number).get<std::string>(),
          groups[group].at("sizes").at(number).get<std::vector<int64_t>>(), group};
}

// The entry of its module, where names were saved with these, and its name there.
using EntryAndName = std::pair<std::string, std::string>;
using SavedByName = std::map<EntryAndName, SavedParameter>;

EntryAndName split(const std::string& name, const json& entries) {
  std::string longest;
  for (const json& each : entries) {
    const auto entry = each.get<std::string>();
    if (name.starts_with(entry + ".") && entry.size() > longest.size()) longest = entry;
  }
  return {longest, longest.empty() ? name : name.substr(longest.size() + 1)};
}

std::string joined(const EntryAndName& name) {
  return name.first.empty() ? name.second : name.first + "." + name.second;
}

// By the names that they have here, all of those that tied ones have.
SavedByName saved_by_name(const json& saved, const LoadOptions& options) {
  const json& groups = saved.at("groups");
  const json entries = saved.value("entries", json::array()), aliases = saved.value("aliases", json::object());
  const Renamer renamed(options.rename);
  SavedByName all;
  std::unordered_map<std::string, SavedParameter> parameters;
  const auto add = [&](const std::string& saved_name, const SavedParameter& theirs) {
    EntryAndName name = split(saved_name, entries);
    name.second = renamed(name.second);
    const auto [known, is_new] = all.emplace(name, theirs);
    if (is_new || known->second.name == theirs.name) return;
    fail(c10::str("renamed, two parameters of an optimizer are \"", joined(name), "\""),
         "change the pattern so that names stay different");
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].at("params").size(); ++i) {
      const SavedParameter theirs = saved_parameter(groups, g, i);
      parameters.emplace(theirs.name, theirs);
      add(theirs.name, theirs);
    }
  }
  for (const auto& [alias, name] : aliases.items()) {
    const auto known = parameters.find(name.get<std::string>());
    if (known != parameters.end()) add(alias, known->second);
  }
  return all;
}

bool is_asked_for(const NamedParameter& mine, const std::string& only) {
  if (!mine.is_named) return mine.name.starts_with(only);
  return std::any_of(mine.names.begin(), mine.names.end(),
                     [&](const EntryAndName& name) { return name.second.starts_with(only); });
}

using Names = std::set<std::string>;

Names first_names(const NamedGroups& groups) {
  Names names;
  for (const auto& group : groups) {
    for (const NamedParameter& each : group) names.insert(each.name);
  }
  return names;
}

// Takes out what stands there under one of its names. `first_names` are those of all parameters here: what is another
// one's first name is not taken by a second one of this.
std::vector<SavedParameter> take(SavedByName& there, const NamedParameter& mine, const Names& first_names) {
  std::vector<SavedParameter> taken;
  const auto take_one = [&](const EntryAndName& name) {
    const auto found = there.find(name);
    if (found == there.end()) return;
    const auto is_same = [&](const SavedParameter& other) { return other.name == found->second.name; };
    if (std::none_of(taken.begin(), taken.end(), is_same)) taken.push_back(found->second);
    there.erase(found);
  };
  if (!mine.is_named) take_one({"", mine.name});
  for (const EntryAndName& name : mine.names) {
    take_one(name);
    // Where two modules here have one name, nobody knows whose this is.
    const bool is_anothers = name.second != mine.name && first_names.contains(name.second);
    if (mine.name == mine.names[0].second && !is_anothers) take_one({"", name.second});
  }
  return taken;
}

ParameterMatch matched(const SavedParameter& saved, const NamedParameter& mine, size_t group) {
  return {saved.name, saved.sizes, saved.group, mine, group};
}

std::vector<ParameterMatch> match_by_place(const NamedGroups& groups, const json& saved, const LoadOptions& options) {
  const Renamer renamed(options.rename);
  std::vector<ParameterMatch> matches;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].size(); ++i) {
      const SavedParameter theirs = saved_parameter(saved, g, i);
      const NamedParameter& mine = groups[g][i];
      const bool is_wanted =
          mine.is_named ? is_asked_for(mine, options.only) : renamed(theirs.name).starts_with(options.only);
      if (is_wanted) matches.push_back(matched(theirs, mine, g));
    }
  }
  return matches;
}

std::string group_of(const ParameterMatch& match) {
  return c10::str("\"", serried::detail::printable(match.saved_name), "\" (group ", match.saved_group, " there, group ",
                  match.group, " here)");
}

}  // namespace

std::string name_by_place(size_t group, size_t number) {
  return "group" + std::to_string(group) + ".param" + std::to_string(number);
}

std::vector<ParameterMatch> match_parameters(const NamedGroups& groups, const json& saved, const LoadOptions& options,
                                             Wanted& wanted) {
  const json& saved_groups = saved.at("groups");
  if (has_names(groups) != has_names(saved_groups) && have_same_counts(groups, saved_groups)) {
    return match_by_place(groups, saved_groups, options);
  }
  SavedByName there = saved_by_name(saved, options);
  const Names names = first_names(groups);
  std::unordered_set<std::string> used;
  std::vector<ParameterMatch> matches;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const NamedParameter& parameter : groups[g]) {
      if (!is_asked_for(parameter, options.only)) continue;
      const std::vector<SavedParameter> found = take(there, parameter, names);
      if (found.empty()) {
        wanted.missing.push_back(parameter.name);
        continue;
      }
      for (const SavedParameter& each : found) used.insert(each.name);
      matches.push_back(matched(found[0], parameter, g));
      for (size_t i = 1; i < found.size(); ++i) matches.back().twins.push_back(found[i].name);
    }
  }
  for (const auto& [name, theirs] : there) {
    if (!used.contains(theirs.name) && name.second.starts_with(options.only)) wanted.extra.push_back(joined(name));
  }
  return matches;
}

void check_order(const char* kind, const NamedGroups& groups, const json& saved_groups,
                 const std::vector<ParameterMatch>& matches) {
  std::vector<std::string> there, matched_names, here;
  for (const json& group : saved_groups) {
    for (const json& name : group.at("params")) there.push_back(name.get<std::string>());
  }
  size_t num_here = 0;
  for (const auto& group : groups) num_here += group.size();
  for (const ParameterMatch& each : matches) {
    matched_names.push_back(each.saved_name);
    here.push_back(each.mine.name);
  }
  if (there == matched_names && matches.size() == num_here) return;
  fail(c10::str(kind, " has one state for all of its parameters in their order, and that is ", list_of_names(there),
                " in the checkpoint, and ", list_of_names(here), " here"),
       "give the optimizer the same parameters in the same order");
}

void check_sizes(const std::vector<ParameterMatch>& matches) {
  for (const ParameterMatch& each : matches) {
    if (each.mine.tensor.sizes() == c10::IntArrayRef(each.saved_sizes)) continue;
    const std::string mine =
        each.mine.name == each.saved_name ? "" : c10::str(" for \"", serried::detail::printable(each.mine.name), "\"");
    fail(c10::str("the parameter \"", serried::detail::printable(each.saved_name), "\" of an optimizer has sizes ",
                  sizes_text(each.saved_sizes), " in the checkpoint, and ", sizes_text(each.mine.tensor.sizes()),
                  " here", mine),
         each.mine.is_named
             ? "load into a model of the same sizes"
             : "load the module in the same call, {\"model\", state_of(*net)}, so that state goes by the "
               "names of parameters, or list parameters in the order in which they were saved");
  }
}

GroupOptions options_of_groups(const std::vector<ParameterMatch>& matches, const json& saved, bool strict) {
  GroupOptions options;
  std::map<size_t, const ParameterMatch*> first_here, first_there;
  for (const ParameterMatch& each : matches) {
    const json& theirs = saved[each.saved_group].at("options");
    const ParameterMatch* here = first_here.emplace(each.group, &each).first->second;
    if (options.emplace(each.group, theirs).first->second != theirs) {
      fail(c10::str("parameters of one group of an optimizer were saved with different options: ", group_of(*here),
                    " and ", group_of(each)),
           "make the groups that were saved");
    }
    const ParameterMatch* there = first_there.emplace(each.saved_group, &each).first->second;
    if (!strict || there->group == each.group) continue;
    fail(c10::str("parameters that were in one group of an optimizer are in two here: ", group_of(*there), " and ",
                  group_of(each)),
         "make the groups that were saved, or pass {.strict = false}: each group gets the options that its parameters "
         "were saved with");
  }
  return options;
}

}  // namespace serried::checkpoint::detail
