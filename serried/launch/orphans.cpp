// Signals of children that end together are one signal, so the kernel's list of children says whom to wait for: to wait
// for any child would find the ended ranks first, which must stay.
#include "serried/launch/orphans.h"

#include <sys/wait.h>

#include <fstream>
#include <vector>

namespace serried::launch {
namespace {

// Empty where the kernel was built without this file. Only a wait takes children off the list, so none is missed.
std::vector<pid_t> children() {
  std::vector<pid_t> result;
  std::ifstream file("/proc/thread-self/children");
  for (pid_t child; file >> child;) result.push_back(child);
  return result;
}

}  // namespace

void reap_orphans(pid_t from, const std::function<bool(pid_t)>& is_kept) {
  std::vector<pid_t> ended = children();
  if (ended.empty()) ended.push_back(from);
  for (const pid_t child : ended) {
    if (!is_kept(child)) ::waitpid(child, nullptr, WNOHANG);
  }
}

}  // namespace serried::launch
