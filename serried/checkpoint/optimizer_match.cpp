// Parameters by name, or by place with their sizes compared; options by parameter, never by the number of a group.
#include "serried/checkpoint/optimizer_match.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
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
      if (names[i] != c10::str("group", g, ".param", i)) return true;
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

SavedParameter saved_parameter(const json& saved, size_t group, size_t number) {
  return {saved[group].at("params").at(number).get<std::string>(),
          saved[group].at("sizes").at(number).get<std::vector<int64_t>>(), group};
}

ParameterMatch matched(const SavedParameter& saved, const NamedParameter& mine, size_t group) {
  return {saved.name, saved.sizes, saved.group, mine, group};
}

std::vector<ParameterMatch> match_by_place(const NamedGroups& groups, const json& saved, const LoadOptions& options) {
  std::vector<ParameterMatch> matches;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].size(); ++i) {
      const SavedParameter theirs = saved_parameter(saved, g, i);
      const std::string name = groups[g][i].is_named ? groups[g][i].name : renamed(theirs.name, options.rename);
      if (name.starts_with(options.only)) matches.push_back(matched(theirs, groups[g][i], g));
    }
  }
  return matches;
}

std::string group_of(const ParameterMatch& match) {
  return c10::str("\"", serried::detail::printable(match.saved_name), "\" (group ", match.saved_group, " there, group ",
                  match.group, " here)");
}

}  // namespace

std::vector<ParameterMatch> match_parameters(const NamedGroups& groups, const json& saved, const LoadOptions& options,
                                             Wanted& wanted) {
  if (has_names(groups) != has_names(saved) && have_same_counts(groups, saved)) {
    return match_by_place(groups, saved, options);
  }
  std::map<std::string, SavedParameter> there;  // by the name that it has here
  for (size_t g = 0; g < saved.size(); ++g) {
    for (size_t i = 0; i < saved[g].at("params").size(); ++i) {
      const SavedParameter theirs = saved_parameter(saved, g, i);
      const std::string name = renamed(theirs.name, options.rename);
      if (!there.emplace(name, theirs).second) {
        fail(c10::str("renamed, two parameters of an optimizer are \"", name, "\""),
             "change the pattern so that names stay different");
      }
    }
  }
  std::vector<ParameterMatch> matches;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const NamedParameter& parameter : groups[g]) {
      if (!parameter.name.starts_with(options.only)) continue;
      const auto found = there.find(parameter.name);
      if (found == there.end()) {
        wanted.missing.push_back(parameter.name);
        continue;
      }
      matches.push_back(matched(found->second, parameter, g));
      there.erase(found);
    }
  }
  for (const auto& [name, theirs] : there) {
    if (name.starts_with(options.only)) wanted.extra.push_back(name);
  }
  return matches;
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
