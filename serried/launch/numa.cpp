// /sys says which cores belong to which memory.
#include "serried/launch/numa.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

[[noreturn]] void raise_no_list(const std::string& text) {
  throw LaunchError(kExitFailure, "--numa: the kernel lists cores as \"" + text + "\", which is no list of numbers",
                    "leave --numa out, and bind ranks by numactl or taskset before the program");
}

int core_in(const std::string& text, const std::string& all) {
  constexpr int kMostCores = 1 << 16;
  int core = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), core);
  if (error != std::errc() || end != text.data() + text.size() || core < 0 || core >= kMostCores) raise_no_list(all);
  return core;
}

}  // namespace

std::vector<int> parse_cores(const std::string& text) {
  std::vector<int> cores;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    const size_t dash = part.find('-');
    const int first = core_in(part.substr(0, dash), text);
    const int last = dash == part.npos ? first : core_in(part.substr(dash + 1), text);
    if (last < first) raise_no_list(text);
    for (int core = first; core <= last; ++core) cores.push_back(core);
    at = end + 1;
  }
  return cores;
}

std::vector<std::vector<int>> numa_nodes(const std::vector<int>& allowed, const std::string& root) {
  std::map<int, std::vector<int>> nodes;
  std::error_code gone;
  for (std::filesystem::directory_iterator entry(root, gone), end; !gone && entry != end; entry.increment(gone)) {
    const std::string name = entry->path().filename().string();
    int number = -1;
    const auto [stop, error] =
        std::from_chars(name.data() + std::min<size_t>(4, name.size()), name.data() + name.size(), number);
    if (!name.starts_with("node") || error != std::errc() || stop != name.data() + name.size()) continue;
    std::ifstream file(entry->path() / "cpulist");
    std::string list;
    std::getline(file, list);
    std::vector<int> cores = parse_cores(list);
    std::erase_if(cores, [&](int core) { return std::find(allowed.begin(), allowed.end(), core) == allowed.end(); });
    if (!cores.empty()) nodes[number] = std::move(cores);
  }
  std::vector<std::vector<int>> result;
  for (auto& [number, cores] : nodes) result.push_back(std::move(cores));
  return result;
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

std::vector<int> cores_of_rank(const std::vector<std::vector<int>>& nodes, int local_rank, int num_local) {
  if (nodes.empty()) {
    throw LaunchError(kExitFailure, "--numa: the kernel lists no memory node with a core for this process",
                      "leave --numa out, and bind ranks by taskset before the program");
  }
  const size_t node = static_cast<size_t>(local_rank) * nodes.size() / static_cast<size_t>(std::max(num_local, 1));
  return nodes.at(std::min(node, nodes.size() - 1));
}

}  // namespace serried::launch
