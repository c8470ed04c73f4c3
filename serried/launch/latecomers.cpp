// The kernel shows which files a process has open; ranks are not asked.
#include "serried/launch/latecomers.h"

#include <filesystem>
#include <system_error>

#include "serried/base/watch_page.h"

namespace serried::launch {
namespace {

bool waits_in_new_group(pid_t pid) {
  const std::string file = std::string("/memfd:") + watch_page::kMeetingPrefix + "new_group (deleted)";
  std::error_code gone;
  const std::filesystem::path folder = "/proc/" + std::to_string(pid) + "/fd";
  for (std::filesystem::directory_iterator entry(folder, gone), end; !gone && entry != end; entry.increment(gone)) {
    std::error_code closed;
    if (std::filesystem::read_symlink(*entry, closed).string() == file) return true;
  }
  return false;
}

void add(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}

}  // namespace

std::string latecomers_text(const std::map<int, pid_t>& ranks) {
  std::string waiting;
  std::string late;
  int num_waiting = 0;
  int num_late = 0;
  for (const auto& [rank, pid] : ranks) {
    const bool waits = pid != 0 && waits_in_new_group(pid);
    const std::string state = pid == 0 ? " (has ended)" : " (pid " + std::to_string(pid) + ")";
    waits ? add(waiting, std::to_string(rank)) : add(late, std::to_string(rank) + state);
    ++(waits ? num_waiting : num_late);
  }
  if (num_waiting == 0 || num_late == 0) return "";
  return (num_waiting == 1 ? "rank " : "ranks ") + waiting + (num_waiting == 1 ? " waits" : " wait") +
         " in new_group for " + (num_late == 1 ? "rank " : "ranks ") + late;
}

}  // namespace serried::launch
