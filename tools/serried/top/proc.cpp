// Reading /proc.
#include "tools/serried/top/proc.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>

#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

constexpr double kSettledSeconds = 5;  // by then a process that is to become another program has

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Names in a folder that are whole numbers.
std::vector<int> numbers_in(const std::string& folder) {
  std::vector<int> numbers;
  std::error_code gone;
  for (std::filesystem::directory_iterator entry(folder, gone), end; !gone && entry != end; entry.increment(gone)) {
    const std::string name = entry->path().filename();
    int number = 0;
    const auto [rest, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && rest == name.data() + name.size() && number >= 0) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Of "VmRSS:     1234 kB".
int64_t kilobytes_of(const std::string& status, std::string_view name) {
  const size_t at = status.find("\n" + std::string(name) + ":");
  if (at == std::string::npos) return 0;
  std::istringstream in(status.substr(at + name.size() + 2, 64));
  int64_t value = 0;
  return in >> value && value > 0 && value < INT64_MAX / 1024 ? value * 1024 : 0;
}

std::map<std::string, std::string> parse_environment(const std::string& text) {
  std::map<std::string, std::string> result;
  std::istringstream in(text);
  for (std::string entry; std::getline(in, entry, '\0');) {
    const size_t sign = entry.find('=');
    if (sign != std::string::npos) result.emplace(entry.substr(0, sign), entry.substr(sign + 1));
  }
  return result;
}

}  // namespace

std::optional<Process> parse_process(const std::string& stat, const std::string& status) {
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return std::nullopt;
  Process process;
  process.pid = std::atoi(stat.c_str());
  std::istringstream in(stat.substr(name_end + 1));
  std::array<std::string, 20> fields;  // from the third on
  if (!(in >> process.state >> process.parent)) return std::nullopt;
  for (size_t i = 2; i < fields.size(); ++i) {
    if (!(in >> fields[i])) return std::nullopt;
  }
  const auto number = [&](size_t field) { return std::strtoull(fields[field - 3].c_str(), nullptr, 10); };
  process.cpu_ticks = number(14) + number(15);
  process.start_ticks = number(22);
  process.resident_bytes = kilobytes_of(status, "VmRSS");
  process.shared_bytes = kilobytes_of(status, "RssShmem");
  return process;
}

std::vector<pid_t> Proc::pids() {
  std::vector<pid_t> all = numbers_in(root_);
  std::erase_if(known_, [&](const auto& each) { return !std::binary_search(all.begin(), all.end(), each.first); });
  return all;
}

std::optional<Process> Proc::process(pid_t pid) const {
  return parse_process(read_all(path(pid, "stat")), read_all(path(pid, "status")));
}

std::optional<uid_t> Proc::owner(pid_t pid) const {
  struct stat folder {};
  if (::stat(path(pid, "").c_str(), &folder) != 0) return std::nullopt;
  return folder.st_uid;
}

double Proc::seconds_since_start(const Process& process) const {
  double uptime = 0;
  std::ifstream(root_ + "/uptime") >> uptime;
  return std::max(0.0, uptime - double(process.start_ticks) / double(::sysconf(_SC_CLK_TCK)));
}

const std::map<std::string, std::string>& Proc::environment(const Process& process) {
  Known& known = known_[process.pid];
  if (known.is_settled && known.start_ticks == process.start_ticks) return known.environment;
  known = {process.start_ticks, seconds_since_start(process) > kSettledSeconds,
           parse_environment(read_all(path(process.pid, "environ")))};
  if (!known.environment.contains("SERRIED_LAUNCHER")) known.environment.clear();
  return known.environment;
}

std::string Proc::command(pid_t pid) const {
  std::string text = read_all(path(pid, "cmdline"));
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  return printable(text);
}

std::string Proc::file_path(pid_t pid, int fd) const {
  return path(pid, "fd/") + std::to_string(fd);
}

std::vector<MemoryFile> Proc::memory_files(pid_t pid) const {
  constexpr std::string_view kPrefix = "/memfd:serried";
  constexpr std::string_view kDeleted = " (deleted)";
  std::vector<MemoryFile> files;
  for (const int fd : numbers_in(path(pid, "fd"))) {
    std::array<char, PATH_MAX> link;
    const ssize_t length = ::readlink(file_path(pid, fd).c_str(), link.data(), link.size());
    std::string_view name(link.data(), size_t(std::max<ssize_t>(length, 0)));
    if (!name.starts_with(kPrefix)) continue;
    if (name.ends_with(kDeleted)) name.remove_suffix(kDeleted.size());
    name.remove_prefix(std::string_view("/memfd:").size());
    files.push_back({fd, std::string(name)});
  }
  return files;
}

}  // namespace serried::top
