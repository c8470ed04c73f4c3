// Words to axes, and groups to axes.
#include "tools/serried/saved_step.h"

#include <algorithm>
#include <charconv>

#include "serried/base/error.h"
#include "serried/base/text.h"

namespace serried::tools {
namespace {

using detail::printable;

[[noreturn]] void refuse(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"plan", what, fix});
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(by, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Of which every rank gives as much whatever the number of ranks.
bool is_free_of_size(const std::string& collective) {
  return collective == "all_reduce" || collective == "reduce" || collective == "broadcast" || collective == "barrier";
}

}  // namespace

MeshPattern::MeshPattern(const std::string& text) {
  for (const std::string& part : split(text, ',')) {
    const size_t equals = part.find('=');
    const std::string size = equals == std::string::npos ? "" : part.substr(equals + 1);
    simulation::Axis axis{part.substr(0, equals), 0};
    const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), axis.size);
    const bool is_number = error == std::errc() && end == size.data() + size.size();
    if (axis.name.empty() || (size != "*" && (!is_number || axis.size < 1 || axis.size > 10'000'000)) ||
        has(axis.name) || (size == "*" && !following_.empty())) {
      refuse("--mesh is \"" + printable(text) + "\"", "pass axes with their sizes, of which one may be *: dp=*,tp=2");
    }
    if (size == "*") axis.size = 0, following_ = axis.name;
    axes_.push_back(axis);
  }
}

bool MeshPattern::has(const std::string& axis) const {
  return std::any_of(axes_.begin(), axes_.end(), [&](const simulation::Axis& each) { return each.name == axis; });
}

std::vector<simulation::Axis> MeshPattern::on(int64_t ranks) const {
  int64_t fixed = 1;
  for (const simulation::Axis& axis : axes_) {
    if (axis.size > 0 && __builtin_mul_overflow(fixed, axis.size, &fixed)) refuse("--mesh is too large", "pass less");
  }
  if (ranks % fixed != 0 || (following_.empty() && ranks != fixed)) {
    refuse(c10::str(ranks, " ranks do not fit the mesh, whose axes make ", fixed),
           following_.empty() ? c10::str("pass --ranks ", fixed, ", or * as the size of an axis")
                              : c10::str("pass a multiple of ", fixed, " as --ranks"));
  }
  std::vector<simulation::Axis> axes = axes_;
  for (simulation::Axis& axis : axes) axis.size = axis.size > 0 ? axis.size : ranks / fixed;
  return axes;
}

std::map<std::string, std::string> groups_of(const std::vector<std::string>& words, const MeshPattern& mesh) {
  std::map<std::string, std::string> axis_of_group;
  for (const std::string& word : words) {
    const size_t equals = word.rfind('=');
    const std::string axis = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (!mesh.has(axis)) {
      refuse("--group is \"" + printable(word) + "\"", "pass the name of a group and an axis of --mesh: default=dp");
    }
    axis_of_group[word.substr(0, equals)] = axis;
  }
  return axis_of_group;
}

void name_groups(graph::Graph& graph, const std::map<std::string, std::string>& axis_of_group,
                 const MeshPattern& mesh) {
  for (graph::Node& node : graph.nodes()) {
    if (!node.is_collective()) continue;
    for (graph::Argument& argument : node.arguments) {
      if (argument.kind != graph::Argument::Kind::group) continue;
      const auto found = axis_of_group.find(argument.constant.toStringRef());
      if (found != axis_of_group.end()) argument.constant = found->second;
    }
    const std::string name = node.short_name(), axis = node.group_name();
    if (!mesh.has(axis)) {
      refuse(
          "the step calls " + name + " on the group \"" + printable(axis) + "\", and nothing says which axis that is",
          "pass --group " + printable(axis) + "=AXIS, with an axis of --mesh");
    }
    if (axis != mesh.following() || is_free_of_size(name)) continue;
    refuse("the step calls " + name + " along \"" + axis + "\", whose bytes depend on how many ranks it has",
           "give that axis in --mesh the size with which the step was captured");
  }
}

}  // namespace serried::tools
