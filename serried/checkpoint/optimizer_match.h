// Which parameter of a saved optimizer is which of one that is here, and which options its groups get.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {

struct NamedParameter {
  std::string name;  // that of a module, or its place: "group0.param3"
  at::Tensor tensor;
  bool is_named;  // by a module
  /// Each that a module has for it, with that of the module's entry; tied weights have several.
  std::vector<std::pair<std::string, std::string>> names = {};
};

using NamedGroups = std::vector<std::vector<NamedParameter>>;

/// "group0.param3": what a parameter is called that no module names.
std::string name_by_place(size_t group, size_t number);

struct ParameterMatch {
  std::string saved_name;
  std::vector<int64_t> saved_sizes;
  size_t saved_group;
  NamedParameter mine;
  size_t group;
  std::vector<std::string> twins = {};  // other parameters of the checkpoint that are this one here
};

/// By name, under which options.rename and options.only understand that of the module, without its entry. By place
/// where one side has no names at all, with as many groups of as many parameters on both sides. `saved` is what an
/// optimizer has saved; names that only one side has go to `wanted`.
std::vector<ParameterMatch> match_parameters(const NamedGroups& groups, const nlohmann::json& saved,
                                             const LoadOptions& options, Wanted& wanted);

/// Failure unless `matches` are all parameters of both sides, in the same order.
void check_order(const char* kind, const NamedGroups& groups, const nlohmann::json& saved_groups,
                 const std::vector<ParameterMatch>& matches);

/// Failure where a parameter has other sizes than when its state was saved.
void check_sizes(const std::vector<ParameterMatch>& matches);

/// By number of a group here: the options that its parameters were saved with. Failure where these are not the same for
/// all of them and, where `strict`, if parameters that were in one group are in several now.
using GroupOptions = std::map<size_t, nlohmann::json>;
GroupOptions options_of_groups(const std::vector<ParameterMatch>& matches, const nlohmann::json& saved, bool strict);

}  // namespace serried::checkpoint::detail
