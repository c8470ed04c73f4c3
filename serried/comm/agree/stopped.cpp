// The state of a process, as /proc has it.
#include "serried/comm/agree/stopped.h"

#include <fstream>

#include <c10/util/StringUtil.h>

namespace serried::detail {
namespace {

bool is_stopped(int pid) {
  std::ifstream file(c10::str("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  const char state = line[name_end + 2];
  return state == 'T' || state == 't';
}

}  // namespace

std::string stopped_text(const std::vector<int>& pids) {
  std::string text;
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    if (pids[rank] == 0 || !is_stopped(pids[rank])) continue;
    text += c10::str(text.empty() ? "; " : ", ", "rank ", rank, " (pid ", pids[rank], ") is stopped");
  }
  return text.empty() ? text : text + ": SIGCONT lets it go on";
}

}  // namespace serried::detail
