// Signals of children that end together are one signal, so the kernel's list of children says whom to wait for: to wait
// for any child would find the ended ranks first, which must stay. Only children are sent signals, never their
// children: the number of a child belongs to it until it is reaped, so no other process can be hit.
#include "serried/launch/orphans.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace serried::launch {
namespace {

// Empty where the kernel was built without this file. Only a wait takes children off the list, so none is missed.
std::set<pid_t> children() {
  std::set<pid_t> result;
  std::ifstream file("/proc/thread-self/children");
  for (pid_t child; file >> child;) result.insert(child);
  return result;
}

void pause_1_ms() {
  const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
  ::nanosleep(&pause, nullptr);
}

std::set<std::string> environment_of(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  std::set<std::string> entries;
  // While a process becomes another program it has none. Threads of the kernel and zombies have no program either.
  for (int i = 0; i < 100; ++i) {
    std::ifstream file(folder + "/environ", std::ios::binary);
    for (std::string entry; std::getline(file, entry, '\0');) entries.insert(entry);
    char program[1];
    if (!entries.empty() || ::readlink((folder + "/exe").c_str(), program, sizeof program) < 0) break;
    pause_1_ms();
  }
  return entries;
}

}  // namespace

bool carries(pid_t pid, const std::vector<std::string>& mark) {
  const std::set<std::string> entries = environment_of(pid);
  return std::all_of(mark.begin(), mark.end(), [&](const std::string& entry) { return entries.contains(entry); });
}

// A shell that started something may have become this process, and as process 1 it is given orphans of anybody: then
// only those are taken for the job's that prove it.
Orphans::Orphans(const Assignment& assignment)
    : mark_(mark_of(assignment)), others_(children()), only_ours_come_(others_.empty() && ::getpid() != 1) {}

Orphans::~Orphans() {
  kill([](pid_t) { return false; });
}

// Decided once for each: the program that a process becomes may have another environment.
bool Orphans::is_ours(pid_t child) {
  if (others_.contains(child)) return false;
  if (only_ours_come_ || asked_.contains(child) || carries(child, mark_)) return true;
  others_.insert(child);
  return false;
}

void Orphans::reap(pid_t from, const IsKept& is_kept) {
  std::set<pid_t> ended = children();
  if (ended.empty() && from > 0) ended.insert(from);
  for (const pid_t child : ended) {
    if (is_kept(child) || ::waitpid(child, nullptr, WNOHANG) != child) continue;
    others_.erase(child);
    asked_.erase(child);
  }
}

std::set<pid_t> Orphans::find(const IsKept& is_kept) {
  reap(0, is_kept);
  std::set<pid_t> result;
  for (const pid_t child : children()) {
    if (!is_kept(child) && is_ours(child)) result.insert(child);
  }
  return result;
}

bool Orphans::ask_to_end(const IsKept& is_kept) {
  const std::set<pid_t> orphans = find(is_kept);
  for (const pid_t orphan : orphans) {
    if (!asked_.insert(orphan).second) continue;
    ::kill(orphan, SIGTERM);
    ::kill(orphan, SIGCONT);  // a stopped one hears nothing else
  }
  return !orphans.empty();
}

void Orphans::kill(const IsKept& is_kept) {
  for (int i = 0; i < 1000; ++i) {
    const std::set<pid_t> orphans = find(is_kept);
    if (orphans.empty()) return;
    for (const pid_t orphan : orphans) ::kill(orphan, SIGKILL);
    pause_1_ms();
  }
  others_.merge(find(is_kept));
}

}  // namespace serried::launch
