// Which jobs of `serried run` there are on this host, and which processes belong to them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tools/serried/top/proc.h"

namespace serried::top {

/// The part of a job that runs on this host, as far as this user may see it.
struct Job {
  std::string id = {};  // TORCHELASTIC_RUN_ID
  pid_t launcher = 0;
  uint64_t launcher_start = 0;  // tells its number from one that is used again
  int world_size = 0;           // of the whole job; 0: not known
  int attempt = 0;
  int node = 0;
  int num_nodes = 1;
  std::string command = {};
  double seconds = 0;               // since its first process here started
  std::map<int, pid_t> ranks = {};  // by rank: the process that speaks for it
  std::vector<int> gone = {};       // ranks of this host whose process has ended
  bool has_ended = false;           // nothing of it is left here
};

/// Every job of which a rank runs here, by id. A rank may have several processes (a debugger, a shell, loaders of
/// data): the one that has a group speaks for it, else the one that the launcher started.
std::vector<Job> find_jobs(Proc& proc);

/// The job that `word` names by the beginning of its id, or by the number of its launcher or of any of its processes;
/// the only one where `word` is empty. TopError where there is none or more than one.
Job choose_job(Proc& proc, const std::string& word);

/// The same job now: its ranks may have been started again, or all be gone while the launcher still lives.
Job look_again(Proc& proc, const Job& job);

}  // namespace serried::top
