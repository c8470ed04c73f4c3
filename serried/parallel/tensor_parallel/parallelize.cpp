// parallelize_module: matches patterns against the module tree and applies styles.
#include "serried/parallel/tensor_parallel/parallelize.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "serried/base/error.h"
#include "serried/parallel/tensor_parallel/consumers.h"
#include "serried/tensor/making/placing.h"

namespace serried {
namespace {

constexpr const char* kParallelize = "parallelize_module";

struct NamedModule {
  std::string path;
  torch::nn::Module* module;
};

void list_modules(const std::string& path, torch::nn::Module& module, std::vector<NamedModule>& found) {
  found.push_back({path, &module});
  for (const auto& child : module.named_children()) {
    list_modules(path.empty() ? child.key() : path + "." + child.key(), *child.value(), found);
  }
}

std::vector<std::string> names_of(const std::string& path) {
  std::vector<std::string> names;
  if (path.empty()) return names;
  size_t begin = 0;
  for (size_t end = path.find('.'); end != std::string::npos; end = path.find('.', begin)) {
    names.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  names.push_back(path.substr(begin));
  return names;
}

bool matches(const std::string& pattern, const std::string& path) {
  const std::vector<std::string> wanted = names_of(pattern);
  const std::vector<std::string> names = names_of(path);
  return std::equal(wanted.begin(), wanted.end(), names.begin(), names.end(),
                    [](const std::string& a, const std::string& b) { return ::fnmatch(a.c_str(), b.c_str(), 0) == 0; });
}

// How many letters differ: insertions, deletions, replacements.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row[b.size()];
}

std::string nearest_paths(const std::string& pattern, const std::vector<NamedModule>& modules) {
  constexpr size_t kShown = 3;
  std::vector<std::pair<size_t, std::string>> near;
  for (const NamedModule& each : modules) {
    if (!each.path.empty()) near.emplace_back(distance(pattern, each.path), each.path);
  }
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min(kShown, near.size()); ++i) {
    text += c10::str(i > 0 ? ", " : "", "\"", near[i].second, "\"");
  }
  return text.empty() ? "the module has no modules inside" : "nearest are " + text;
}

struct Match {
  const ParallelStyle* style;
  NamedModule target;
};

// A module that is registered in two places is one module.
bool has(const std::vector<Match>& found, const ParallelStyle& style, const torch::nn::Module* module) {
  return std::any_of(found.begin(), found.end(),
                     [&](const Match& match) { return match.style == &style && match.target.module == module; });
}

std::vector<Match> matches_of(const ParallelPlan& plan, const std::vector<NamedModule>& modules) {
  std::vector<Match> found;
  for (const auto& [pattern, style] : plan) {
    const size_t before = found.size();
    for (const NamedModule& each : modules) {
      if (matches(pattern, each.path) && !has(found, style, each.module)) found.push_back({&style, each});
    }
    if (found.size() > before) continue;
    raise<c10::ValueError>(
        {kParallelize, c10::str("the pattern \"", pattern, "\" matches no module; ", nearest_paths(pattern, modules)),
         "name modules as named_modules() does; * stays within one name, \"\" is the module itself"});
  }
  std::stable_partition(found.begin(), found.end(), [](const Match& m) { return !m.style->comes_last(); });
  return found;
}

void check_mesh(const DeviceMesh& mesh) {
  if (mesh.ndim() != 1) {
    raise<c10::ValueError>(
        {kParallelize, c10::str(mesh.to_string(), " has ", mesh.ndim(), " axes, and styles cut over one"),
         mesh.dim_names().empty() ? "pass a mesh of one axis; give the axes names to pick one of them"
                                  : c10::str("pass one axis of it, such as mesh[\"", mesh.dim_names().back(), "\"]")});
  }
  detail::check_in_mesh(kParallelize, mesh);
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  check_mesh(mesh);
  std::vector<NamedModule> modules;
  list_modules("", module, modules);
  const std::vector<Match> found = matches_of(plan, modules);
  for (const Match& match : found) {
    const detail::ApplyingTo scope(match.target.path);
    detail::check_not_sharded(*match.target.module);
  }
  for (const Match& match : found) {
    const detail::ApplyingTo scope(match.target.path);
    match.style->apply(*match.target.module, mesh);
  }
  detail::place_the_rest(module, mesh);
}

}  // namespace serried
