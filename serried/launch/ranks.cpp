// Processes of one node. An ended rank stays a zombie until the attempt is over, so that its process group's number
// cannot be reused before the last signal to that group is sent.
#include "serried/launch/ranks.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "serried/launch/error.h"
#include "serried/launch/numa.h"
#include "serried/launch/spawn.h"

namespace serried::launch {

namespace {

RankStreamOptions stream_options(const Options& options, int rank, const std::string& log, const char* ending) {
  const std::vector<int>& only = options.only_ranks;
  return {.log_path = log.empty() ? "" : log + ending,
          .shown = only.empty() || std::find(only.begin(), only.end(), rank) != only.end()};
}

}  // namespace

class LocalRank {
 public:
  LocalRank(const Surroundings& surroundings, int rank, int line, const std::string& log, const SpawnRequest& request)
      : rank(rank),
        line(line),
        out(surroundings.screen, Stream::out, rank, stream_options(surroundings.options, rank, log, ".out")),
        err(surroundings.screen, Stream::err, rank, stream_options(surroundings.options, rank, log, ".err")),
        child(spawn(request)),
        guard_(surroundings.guard),
        lines_(surroundings.lines) {
    guard_.add(child.pid);
  }

  ~LocalRank() {
    ::kill(-child.pid, SIGKILL);
    guard_.remove(child.pid);
    reap_group();
    lines_.close(line);
    pump();
    out.finish();
    err.finish();
  }

  void pump() {
    if (child.out && !out.pump(child.out.get())) child.out.reset();
    if (child.err && !err.pump(child.err.get())) child.err.reset();
  }

  /// Whether it has ended since the last call.
  bool look() {
    if (ended) return false;
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return false;
    if (info.si_pid == 0) return false;
    ended = true;
    by_signal = info.si_code != CLD_EXITED;
    status = info.si_status;
    lines_.close(line);
    pump();
    // Its last words are often cut off in the middle of a line: they belong to the report.
    out.finish();
    err.finish();
    return true;
  }

  bool failed() const { return ended && (by_signal || status != 0); }

  Cause cause() const {
    return {.kind = Cause::Kind::rank_failed,
            .rank = rank,
            .pid = child.pid,
            .exit_code = by_signal ? 0 : status,
            .signal = by_signal ? status : 0,
            .tail = {err.tail().begin(), err.tail().end()}};
  }

  /// It has another number from now on.
  void rename(int new_rank) {
    rank = new_rank;
    out.rename(rank);
    err.rename(rank);
    lines_.rename(line, rank);
  }

  int rank;
  int line;
  int seat = -1;
  std::optional<BlackBox> box;
  RankStream out;
  RankStream err;
  Child child;
  bool ended = false;
  bool by_signal = false;
  int status = 0;

 private:
  // Killed processes end at once, save those stuck in a file system: they are not waited for.
  void reap_group() const {
    const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
    for (int i = 0; i < 1000; ++i) {
      pid_t reaped;
      do reaped = ::waitpid(-child.pid, nullptr, WNOHANG);
      while (reaped > 0);
      if (reaped < 0) return;
      ::nanosleep(&pause, nullptr);
    }
  }

  Guard& guard_;
  Lines& lines_;
};

namespace {

// A rank that fails is left by its group before its process ends: its peers may well be seen to end first.
constexpr Seconds kCulpritPatience{2};

// Of ranks that fail together: one that was killed makes its peers fail, seldom the other way round.
int blame(const Cause& cause) {
  if (only_suffers(cause)) return 0;
  return cause.signal != 0 ? 2 : 1;
}

std::string attempt_folder(const Options& options, int attempt) {
  if (options.log_dir.empty()) return "";
  const std::filesystem::path folder = std::filesystem::path(options.log_dir) / ("attempt_" + std::to_string(attempt));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw LaunchError(kExitUsage, "cannot make the folder " + folder.string() + ": " + error.message(),
                      "pass a --log-dir that you may write to");
  }
  return folder.string();
}

}  // namespace

LocalRanks::LocalRanks(const Surroundings& surroundings, const Assignment& assignment)
    : screen_(surroundings.screen), lines_(surroundings.lines), keep_going_(assignment.keep_going) {
  for (int local_rank = 0; local_rank < assignment.num_local; ++local_rank) start(surroundings, assignment, local_rank);
}

void LocalRanks::start(const Surroundings& surroundings, const Assignment& assignment, int local_rank) {
  const auto& seats = assignment.seats;
  const int rank = keep_going_ ? seats.at(size_t(local_rank)).rank : assignment.first_rank + local_rank;
  const std::string folder = attempt_folder(surroundings.options, assignment.attempt);
  const std::string log = folder.empty() ? "" : folder + "/rank_" + std::to_string(rank);
  const Lines::Opened line = surroundings.lines.open(rank);
  const int line_fd = line.rank_end.get();
  SpawnRequest request{.path = surroundings.program,
                       .arguments = surroundings.options.command,
                       .environment = rank_environment(assignment, local_rank, inherited_environment(), line_fd),
                       .keep_fds = {line_fd}};
  if (surroundings.options.numa) {
    request.cores = cores_of_rank(numa_nodes(allowed_cores()), local_rank, assignment.num_local);
  }
  if (rank == 0 && assignment.listen_fd >= 0) request.keep_fds.push_back(assignment.listen_fd);
  BlackBox box = BlackBox::make(rank, assignment.run_id);
  if (box.fd() >= 0) request.keep_fds.push_back(box.fd());
  if (box.fd() >= 0) request.environment.push_back(black_box::kVariable + ("=" + std::to_string(box.fd())));
  ranks_.push_back(std::make_unique<LocalRank>(surroundings, rank, line.line, log, request));
  ranks_.back()->box = std::move(box);
  if (keep_going_) ranks_.back()->seat = seats.at(size_t(local_rank)).number;
}

void LocalRanks::change(const Surroundings& surroundings, const Assignment& assignment) {
  for (size_t local_rank = 0; local_rank < assignment.seats.size(); ++local_rank) {
    const Seat& seat = assignment.seats[local_rank];
    const auto found =
        std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& r) { return r->seat == seat.number; });
    if (found == ranks_.end()) {
      // One that has just ended, of which the leader does not know yet, is not started again by this table.
      if (seat.fresh) start(surroundings, assignment, static_cast<int>(local_rank));
      continue;
    }
    (*found)->rename(seat.rank);
    Message table = {"table"};
    for (const int number : {assignment.attempt, seat.rank, assignment.world_size, static_cast<int>(local_rank),
                             static_cast<int>(assignment.seats.size()), assignment.node_rank, assignment.num_nodes}) {
      table.push_back(std::to_string(number));
    }
    lines_.tell((*found)->line, table);
  }
}

void LocalRanks::say_over(int generation, const std::string& why) {
  for (const auto& rank : ranks_) lines_.tell(rank->line, {"over", std::to_string(generation), why});
}

std::vector<LocalRanks::Ended> LocalRanks::take_ended() {
  std::vector<Ended> result;
  for (const auto& rank : ranks_) {
    if (!rank->ended) continue;
    result.push_back({rank->seat, rank->failed() ? std::optional(rank->cause()) : std::nullopt});
  }
  std::erase_if(ranks_, [](const auto& rank) { return rank->ended; });
  return result;
}

std::vector<int> LocalRanks::take_elastic() {
  std::vector<int> result;
  for (const int line : lines_.take_elastic()) {
    for (const auto& rank : ranks_) {
      if (rank->line == line) result.push_back(rank->seat);
    }
  }
  return result;
}

LocalRanks::~LocalRanks() {
  // All at once first: ranks that wait for each other then end together.
  for (const auto& rank : ranks_) ::kill(-rank->child.pid, SIGKILL);
}

void LocalRanks::watch(std::vector<Watch>& watches) {
  if (screen_.full()) return;
  for (const auto& rank : ranks_) {
    LocalRank* r = rank.get();
    if (r->child.out) watches.push_back({r->child.out.get(), POLLIN, [r] { r->pump(); }});
    if (r->child.err) watches.push_back({r->child.err.get(), POLLIN, [r] { r->pump(); }});
  }
}

void LocalRanks::look() {
  for (const auto& rank : ranks_) {
    if (!rank->look() || !rank->failed() || keep_going_) continue;
    Cause cause = rank->cause();
    if (!suspect_ || blame(cause) > blame(*suspect_)) suspect_ = std::move(cause);
  }
  if (suspect_ && decide_at_ == kNever) decide_at_ = after(kCulpritPatience);
  decide();
}

void LocalRanks::decide() {
  if (failure_ || !suspect_) return;
  if (only_suffers(*suspect_) && !all_ended() && Clock::now() < decide_at_) return;
  failure_ = suspect_;
  if (only_suffers(*failure_)) failure_->text = who_ended_well();
}

// Ranks that return early make the others fail, and look blameless.
std::string LocalRanks::who_ended_well() const {
  std::string list;
  int count = 0;
  for (const auto& rank : ranks_) {
    if (!rank->ended || rank->failed()) continue;
    list += (count++ == 0 ? "" : ", ") + std::to_string(rank->rank);
  }
  if (count == 0) return "";
  return (count == 1 ? "rank " : "ranks ") + list + " had ended with code 0";
}

Time LocalRanks::deadline() const {
  return failure_ ? kNever : decide_at_;
}

bool LocalRanks::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->ended; });
}

std::map<int, pid_t> LocalRanks::pids() const {
  std::map<int, pid_t> result;
  for (const auto& rank : ranks_) {
    result[rank->rank] = rank->ended ? 0 : rank->child.pid;
  }
  return result;
}

std::map<int, const BlackBox*> LocalRanks::boxes() const {
  std::map<int, const BlackBox*> result;
  for (const auto& rank : ranks_) result[rank->rank] = &*rank->box;
  return result;
}

std::vector<RankSeen> LocalRanks::seen(int64_t now_ns, int64_t longest_wait_ns) const {
  std::vector<RankSeen> result;
  for (const auto& rank : ranks_) {
    const BlackBox& box = *rank->box;
    // A shell or a debugger may stand between: who writes is the one to look at.
    const pid_t pid = box.pid() != 0 ? box.pid() : rank->child.pid;
    result.push_back({.rank = rank->rank,
                      .pid = pid,
                      .state = rank->ended ? 'Z' : process_state(pid),
                      .groups = box.groups(now_ns, longest_wait_ns),
                      .num_calls = box.num_calls(),
                      .problem = box.problem()});
    if (!keep_going_) continue;
    // What a rank has written of itself is the number that it began with.
    for (GroupSeen& group : result.back().groups) group.job_rank = -1;
  }
  return result;
}

void LocalRanks::tell_clock(const std::optional<ClockEstimate>& clock) {
  if (!clock) return;
  for (const auto& rank : ranks_) {
    const std::optional<ClockEstimate> told = rank->box->clock();
    if (!told || told->offset_ns != clock->offset_ns) rank->box->tell_clock(*clock);
  }
}

bool LocalRanks::has(pid_t pid) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) { return rank->child.pid == pid; });
}

void LocalRanks::send(int signal) {
  for (const auto& rank : ranks_) ::kill(-rank->child.pid, signal);
}

}  // namespace serried::launch
