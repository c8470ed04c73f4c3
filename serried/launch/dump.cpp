// Files, and the tools that show stacks.
#include "serried/launch/dump.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "serried/launch/error.h"
#include "serried/launch/loop.h"
#include "serried/launch/seen_json.h"
#include "serried/launch/spawn.h"

namespace serried::launch {
namespace {

constexpr size_t kMostStackBytes = 1 << 16;
constexpr uintmax_t kMostDumpBytes = uintmax_t(1) << 30;

// "" where there is none.
std::string path_of_tool(const std::string& name) {
  const char* variable = std::getenv("PATH");
  std::istringstream folders(variable == nullptr ? "/usr/bin:/bin" : variable);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = folder + "/" + name;
    if (!folder.empty() && ::access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

std::vector<std::string> stack_command(int pid) {
  const std::string number = std::to_string(pid);
  if (const std::string tool = path_of_tool("eu-stack"); !tool.empty()) return {tool, "-p", number};
  if (const std::string tool = path_of_tool("gdb"); !tool.empty()) {
    return {tool, "-nx", "-batch", "-p", number, "-ex", "thread apply all backtrace 32"};
  }
  return {};
}

/// A tool on its way. Its end takes it away, with what it holds of the process.
class StackTool {
 public:
  explicit StackTool(int pid) {
    const std::vector<std::string> command = stack_command(pid);
    if (command.empty()) return;
    try {
      child_ = spawn({.path = command[0], .arguments = command, .environment = inherited_environment()});
    } catch (const LaunchError&) {  // then there is no stack
    }
  }
  ~StackTool() {
    if (child_.pid <= 0) return;
    ::kill(-child_.pid, SIGKILL);
    ::waitpid(child_.pid, nullptr, 0);
  }
  StackTool(const StackTool&) = delete;
  StackTool& operator=(const StackTool&) = delete;

  void watch(std::vector<Watch>& watches) {
    if (child_.out) watches.push_back({child_.out.get(), POLLIN, [this] { read(); }});
  }
  bool is_open() const { return bool(child_.out); }
  const std::string& text() const { return text_; }

 private:
  void read() {
    char buffer[4096];
    const ssize_t count = ::read(child_.out.get(), buffer, sizeof buffer);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) return child_.out.reset();
    const size_t room = kMostStackBytes - std::min(kMostStackBytes, text_.size());
    text_.append(buffer, std::min(size_t(count), room));
  }

  Child child_;
  std::string text_;
};

// Of the launcher's kind, or another: whoever names a folder may have others' files there.
std::string text_of_file(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::file_size(path, error) > kMostDumpBytes || error) {
    throw std::runtime_error(error ? error.message() : "it is larger than 1 GiB");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::strerror(errno));
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::vector<std::string> stacks_of(const std::vector<int>& pids, Seconds patience) {
  const Time deadline = after(patience);
  std::vector<std::unique_ptr<StackTool>> tools;
  for (const int pid : pids) tools.push_back(std::make_unique<StackTool>(pid));
  while (Clock::now() < deadline) {
    std::vector<Watch> watches;
    for (const auto& tool : tools) tool->watch(watches);
    if (watches.empty()) break;
    poll_once(watches, deadline);
  }
  std::vector<std::string> texts;
  for (const auto& tool : tools) texts.push_back(tool->is_open() ? "" : tool->text());
  return texts;
}

void add_calls(HostSeen& seen, const std::map<int, const BlackBox*>& boxes) {
  for (const auto& [rank, box] : boxes) {
    const std::optional<ClockEstimate> clock = box->clock();
    if (!clock || seen.has_clock) continue;
    seen.has_clock = true;
    seen.clock_offset_ns = clock->offset_ns;
    seen.clock_error_ns = clock->error_ns;
  }
  for (RankSeen& rank : seen.ranks) {
    const auto box = boxes.find(rank.rank);
    if (box == boxes.end()) continue;
    rank.num_calls = box->second->num_calls();
    rank.calls = box->second->calls();
  }
}

void add_stacks(HostSeen& seen, Seconds patience) {
  std::vector<int> pids;
  std::vector<RankSeen*> living;
  for (RankSeen& rank : seen.ranks) {
    if (rank.pid <= 0 || rank.state == 'Z' || rank.state == 'X') continue;
    living.push_back(&rank);
    pids.push_back(rank.pid);
  }
  const std::vector<std::string> stacks = stacks_of(pids, patience);
  for (size_t i = 0; i < living.size(); ++i) living[i]->stack = stacks[i];
}

std::string dump_name(const HostSeen& seen, int num_nodes) {
  std::string host = seen.host;
  std::replace(host.begin(), host.end(), '/', '_');
  return host + (num_nodes > 1 ? "." + std::to_string(seen.node) : "") + ".json";
}

std::string write_dump(const HostSeen& seen, const std::string& folder, int num_nodes) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::filesystem::path path = std::filesystem::path(folder) / dump_name(seen, num_nodes);
  const std::filesystem::path half = path.string() + ".part";
  {
    std::ofstream file(half, std::ios::binary);
    file << to_json(seen, /*spaced=*/false) << "\n";
    file.flush();
    if (!file) throw std::runtime_error("cannot write " + half.string() + ": " + std::strerror(errno));
  }
  std::filesystem::rename(half, path, error);
  if (error) throw std::runtime_error("cannot write " + path.string() + ": " + error.message());
  return path.string();
}

std::vector<HostSeen> read_dumps(const std::string& folder, std::vector<std::string>& problems) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".json") paths.push_back(entry->path());
  }
  if (error) problems.push_back(folder + ": " + error.message());
  std::sort(paths.begin(), paths.end());
  std::vector<HostSeen> dumps;
  for (const std::filesystem::path& path : paths) {
    try {
      dumps.push_back(host_seen_from(text_of_file(path)));
    } catch (const std::runtime_error& why) {
      problems.push_back(path.filename().string() + " is no dump: " + why.what());
    }
  }
  std::stable_sort(dumps.begin(), dumps.end(), [](const HostSeen& a, const HostSeen& b) { return a.node < b.node; });
  return dumps;
}

}  // namespace serried::launch
