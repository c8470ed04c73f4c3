// From an assignment to environments; pure, so it is tested without processes.
#include "serried/launch/plan.h"

#include <unistd.h>

#include <map>
#include <set>

#include "serried/base/channel/rank_line.h"
#include "serried/launch/token.h"

namespace serried::launch {
namespace {

// Ranks of a node begin in several generations, and its number changes.
constexpr const char* kMark = "SERRIED_LAUNCHER_MARK";

std::string name_of(const std::string& entry) {
  return entry.substr(0, entry.find('='));
}

std::map<std::string, std::string> rank_variables(const Assignment& assignment, int local_rank) {
  return {
      {"GROUP_RANK", std::to_string(assignment.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(assignment.num_nodes)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(assignment.num_local)},
      {"MASTER_ADDR", assignment.master_host},
      {"MASTER_PORT", std::to_string(assignment.master_port)},
      {"RANK", std::to_string(assignment.first_rank + local_rank)},
      {"SERRIED_LAUNCHER", "1"},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(assignment.max_restarts)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(assignment.attempt)},
      {"TORCHELASTIC_RUN_ID", assignment.run_id},
      {"WORLD_SIZE", std::to_string(assignment.world_size)},
  };
}

}  // namespace

std::vector<std::string> rank_environment(const Assignment& assignment, int local_rank,
                                          const std::vector<std::string>& inherited, int line_fd) {
  std::map<std::string, std::string> ours = rank_variables(assignment, local_rank);
  if (assignment.listen_fd >= 0 && assignment.first_rank + local_rank == 0) {
    ours["SERRIED_MASTER_LISTEN_FD"] = std::to_string(assignment.listen_fd);
  }
  if (assignment.keep_going) {
    ours["RANK"] = std::to_string(assignment.seats.at(static_cast<size_t>(local_rank)).rank);
    ours["SERRIED_GENERATION"] = std::to_string(assignment.attempt);
    ours[kMark] = assignment.mark;
  }
  if (line_fd >= 0) ours[channel::kLineVariable] = std::to_string(line_fd);
  if (!assignment.job_secret.empty()) ours["SERRIED_JOB_SECRET"] = assignment.job_secret;
  // A launcher that runs inside another launcher's rank must not hand that one's meeting place on, nor its secret.
  std::set<std::string> dropped = {channel::kLineVariable,        kMark,
                                   "SERRIED_BLACK_BOX_FD",        "SERRIED_GENERATION",
                                   "SERRIED_JOB_SECRET",          "SERRIED_MASTER_LISTEN_FD",
                                   "TORCHELASTIC_USE_AGENT_STORE"};
  dropped.insert(token_variables().begin(), token_variables().end());
  bool threads_chosen = false;
  std::vector<std::string> result;
  for (const std::string& entry : inherited) {
    const std::string name = name_of(entry);
    threads_chosen = threads_chosen || (name == "OMP_NUM_THREADS" && entry != "OMP_NUM_THREADS=");
    if (!ours.contains(name) && !dropped.contains(name)) result.push_back(entry);
  }
  // Ranks that each start one thread per core slow each other down many times over.
  if (!threads_chosen && assignment.num_local > 1) ours["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : ours) result.push_back(name + "=" + value);
  return result;
}

std::vector<std::string> mark_of(const Assignment& assignment) {
  if (!assignment.mark.empty()) {
    return {std::string(kMark) + "=" + assignment.mark, "TORCHELASTIC_RUN_ID=" + assignment.run_id};
  }
  // Several nodes of a job may be on one machine, in tests at least, and the number of a lost one passes to another.
  return {"GROUP_RANK=" + std::to_string(assignment.node_rank),
          "TORCHELASTIC_RESTART_COUNT=" + std::to_string(assignment.attempt),
          "TORCHELASTIC_RUN_ID=" + assignment.run_id};
}

std::vector<std::string> inherited_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

}  // namespace serried::launch
