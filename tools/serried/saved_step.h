// A step that was captured and saved elsewhere, on meshes of other sizes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "serried/graph/graph.h"
#include "tools/serried/simulate/job.h"

namespace serried::tools {

/// What `--mesh` says: "dp=*,tp=2".
class MeshPattern {
 public:
  /// ValueError for what is no list of axes, or has more than one that follows.
  explicit MeshPattern(const std::string& text);

  /// With the axis of "*" as large as the ranks make it. ValueError where they do not fit.
  std::vector<simulation::Axis> on(int64_t ranks) const;

  /// Empty: none.
  const std::string& following() const { return following_; }
  bool has(const std::string& axis) const;

 private:
  std::vector<simulation::Axis> axes_;  // size 0: follows
  std::string following_;
};

/// "default=dp" of `--group`, by name of the group. ValueError for other words, and for axes that are not there.
std::map<std::string, std::string> groups_of(const std::vector<std::string>& words, const MeshPattern& mesh);

/// Names groups by the axes that they are. ValueError for collectives on the axis that follows whose bytes depend on
/// its size.
void name_groups(graph::Graph& graph, const std::map<std::string, std::string>& axis_of_group, const MeshPattern& mesh);

}  // namespace serried::tools
