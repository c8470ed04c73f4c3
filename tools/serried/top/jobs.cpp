// Jobs by what the launcher puts into the environment of ranks.
#include "tools/serried/top/jobs.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "serried/base/black_box_page.h"
#include "tools/serried/top/error.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

constexpr int kMostRanksOfAJob = 1 << 20;

std::optional<int> number_in(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

/// What the launcher tells a rank.
struct Marks {
  std::string id;
  int rank = 0;
  int local_rank = 0;
  int world_size = 0;
  int local_world_size = 0;
  int attempt = 0;
  int node = 0;
  int num_nodes = 1;
};

std::optional<Marks> marks_of(const std::map<std::string, std::string>& environment) {
  const auto text = [&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? std::string() : found->second;
  };
  const auto number = [&](const char* name) { return number_in(text(name)).value_or(kMostRanksOfAJob); };
  if (text("SERRIED_LAUNCHER") != "1" || text("TORCHELASTIC_RUN_ID").empty()) return std::nullopt;
  Marks marks{printable(text("TORCHELASTIC_RUN_ID")),
              number("RANK"),
              number("LOCAL_RANK"),
              number("WORLD_SIZE"),
              number("LOCAL_WORLD_SIZE"),
              number_in(text("TORCHELASTIC_RESTART_COUNT")).value_or(0),
              number_in(text("GROUP_RANK")).value_or(0),
              number_in(text("GROUP_WORLD_SIZE")).value_or(1)};
  const bool makes_sense = marks.world_size < kMostRanksOfAJob && marks.rank < marks.world_size &&
                           marks.local_world_size <= marks.world_size && marks.local_rank < marks.local_world_size &&
                           marks.local_rank <= marks.rank;
  return makes_sense ? std::optional<Marks>(marks) : std::nullopt;
}

struct Marked {
  Process process;
  Marks marks;
};

using ById = std::map<std::string, std::vector<Marked>>;

ById marked_processes(Proc& proc) {
  ById result;
  for (const pid_t pid : proc.pids()) {
    const std::optional<Process> process = proc.process(pid);
    if (!process || process->has_ended()) continue;
    if (const std::optional<Marks> marks = marks_of(proc.environment(*process))) {
      result[marks->id].push_back({*process, *marks});
    }
  }
  return result;
}

// Of one rank's processes, the first of which the launcher has started.
pid_t speaker_of(const Proc& proc, const std::vector<const Marked*>& processes) {
  for (const Marked* each : processes) {
    const std::vector<MemoryFile> files = proc.memory_files(each->process.pid);
    const auto is_of_a_group = [](const MemoryFile& file) { return file.name != black_box::kFileName; };
    if (std::any_of(files.begin(), files.end(), is_of_a_group)) return each->process.pid;
  }
  return processes.front()->process.pid;
}

Job make_job(Proc& proc, const std::string& id, const std::vector<Marked>& processes) {
  Job job{.id = id};
  std::set<pid_t> own;
  for (const Marked& each : processes) {
    own.insert(each.process.pid);
    job.attempt = std::max(job.attempt, each.marks.attempt);
  }
  std::map<int, std::vector<const Marked*>> by_rank;
  std::set<int> expected;
  for (const Marked& each : processes) {
    if (each.marks.attempt != job.attempt) continue;
    std::vector<const Marked*>& of_rank = by_rank[each.marks.rank];
    const bool is_first = !own.contains(each.process.parent);
    of_rank.insert(is_first ? of_rank.begin() : of_rank.end(), &each);
    job.world_size = each.marks.world_size;
    job.node = each.marks.node;
    job.num_nodes = each.marks.num_nodes;
    const int first_rank = each.marks.rank - each.marks.local_rank;
    for (int i = 0; i < each.marks.local_world_size; ++i) expected.insert(first_rank + i);
    if (!is_first) continue;
    job.launcher = each.process.parent;
    if (const auto launcher = proc.process(job.launcher)) job.launcher_start = launcher->start_ticks;
    job.seconds = std::max(job.seconds, proc.seconds_since_start(each.process));
    if (job.command.empty()) job.command = proc.command(each.process.pid);
  }
  for (const auto& [rank, of_rank] : by_rank) job.ranks[rank] = speaker_of(proc, of_rank);
  for (const int rank : expected) {
    if (!job.ranks.contains(rank)) job.gone.push_back(rank);
  }
  return job;
}

std::string describe(const Job& job) {
  return "  " + job.id + "  launcher " + std::to_string(job.launcher) + ", " + std::to_string(job.ranks.size()) +
         (job.ranks.size() == 1 ? " rank" : " ranks") + ", " + duration_text(job.seconds) + ", " +
         job.command.substr(0, 60);
}

std::string describe(const std::vector<Job>& jobs) {
  std::string text;
  for (const Job& job : jobs) text += "\n" + describe(job);
  return text;
}

// Whether a process of the job, a rank's or another, has that number.
bool has_process(Proc& proc, const Job& job, pid_t pid) {
  if (job.launcher == pid) return true;
  const std::optional<Process> process = proc.process(pid);
  if (!process) return false;
  const std::optional<Marks> marks = marks_of(proc.environment(*process));
  return marks && marks->id == job.id;
}

[[noreturn]] void raise_unknown(const Proc& proc, const std::string& word, const std::vector<Job>& jobs) {
  const std::optional<int> pid = number_in(word);
  const std::optional<uid_t> owner = pid ? proc.owner(*pid) : std::nullopt;
  if (owner && *owner != ::geteuid() && ::geteuid() != 0) {
    throw TopError("process " + word + " belongs to user " + std::to_string(*owner) + ", and this is user " +
                       std::to_string(::geteuid()),
                   "ask that user, or root: nobody else can look at a job");
  }
  const std::string what = owner ? "process " + word + " is no rank of a job that serried run started"
                                 : "no job here is called \"" + printable(word) + "\"";
  throw TopError(what + (jobs.empty() ? ", and none of this user's runs" : "; those of this user:" + describe(jobs)),
                 jobs.empty() ? "start one with serried run -n 4 ./train" : "serried top " + jobs.front().id);
}

}  // namespace

std::vector<Job> find_jobs(Proc& proc) {
  std::vector<Job> jobs;
  for (const auto& [id, processes] : marked_processes(proc)) jobs.push_back(make_job(proc, id, processes));
  return jobs;
}

Job choose_job(Proc& proc, const std::string& word) {
  std::vector<Job> jobs = find_jobs(proc);
  if (jobs.empty() && word.empty()) {
    throw TopError("no job of this user runs on this host",
                   "start one with serried run -n 4 ./train, or look as the user and on the host that runs it");
  }
  std::vector<Job> chosen;
  const std::optional<int> pid = number_in(word);
  for (const Job& job : jobs) {
    if (pid && has_process(proc, job, *pid)) return job;  // ids are hexadecimal: one may begin like a pid
    if (job.id.starts_with(word)) chosen.push_back(job);
  }
  if (chosen.empty()) raise_unknown(proc, word, jobs);
  if (chosen.size() == 1) return chosen.front();
  throw TopError(std::to_string(chosen.size()) + " jobs run here:" + describe(chosen),
                 "name one: serried top " + chosen.front().id);
}

Job look_again(Proc& proc, const Job& job) {
  for (const auto& [id, processes] : marked_processes(proc)) {
    if (id == job.id) return make_job(proc, id, processes);
  }
  Job rest = job;
  for (const auto& [rank, pid] : std::exchange(rest.ranks, {})) rest.gone.push_back(rank);
  std::sort(rest.gone.begin(), rest.gone.end());
  const std::optional<Process> launcher = proc.process(job.launcher);
  rest.has_ended = !launcher || launcher->has_ended() || launcher->start_ticks != job.launcher_start;
  return rest;
}

}  // namespace serried::top
