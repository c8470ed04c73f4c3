// From pages and processes to rows.
#include "tools/serried/top/snapshot.h"

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "serried/base/call_text.h"
#include "serried/base/watch_page.h"
#include "tools/serried/top/notes.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

using Clock = std::chrono::steady_clock;
using watch_page::Call;

// Ranks that meet in a collective sleep for moments all the time: that is no news.
constexpr double kNewsSeconds = 0.1;

uint64_t now_ns() {
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count());
}

// A clock that was set, or a value that was half written, may lie ahead.
double seconds_since(uint64_t ns) {
  const uint64_t now = now_ns();
  return ns >= now ? 0 : double(now - ns) * 1e-9;
}

Place place_of(const Page& page, const Call& call) {
  return {watch_page::group_text(page.group), call_text(call), part_of_text(call), bytes_of(call), call.sequence};
}

/// A rank in the pages: what it does in each of its groups.
struct Membership {
  const Page* page;
  const PageRank* rank;
};

/// Everything that processes of the job have published, each file once.
class Published {
 public:
  Published(const Proc& proc, const Job& job) {
    for (const auto& [rank, pid] : job.ranks) read(proc, rank, pid);
  }

  std::vector<Membership> of(pid_t pid) const {
    std::vector<Membership> result;
    for (const auto& [file, page] : pages) {
      for (const PageRank& rank : page.ranks) {
        if (rank.pid == pid && !rank.has_left) result.push_back({&page, &rank});
      }
    }
    return result;
  }

  std::map<uint64_t, Page> pages;
  std::map<pid_t, std::pair<std::string, double>> meetings;  // the call and for how many seconds
  std::map<int, std::string> problems;                       // by rank

 private:
  void read(const Proc& proc, int rank, pid_t pid) {
    const std::string_view meeting = watch_page::kMeetingPrefix;
    for (const MemoryFile& file : proc.memory_files(pid)) {
      if (std::string_view(file.name).starts_with(meeting)) {
        meetings[pid] = {printable(file.name.substr(meeting.size())), age(proc.file_path(pid, file.fd))};
      } else if (file.name == watch_page::kSegmentName || file.name == watch_page::kPageName) {
        Page page = read_page(proc, pid, file.fd);
        if (!page.problem.empty()) problems[rank] = page.problem;
        if (page.problem.empty()) pages.emplace(page.file, std::move(page));
      }
    }
  }

  static double age(const std::string& path) {
    struct stat file {};
    timespec now{};
    if (::stat(path.c_str(), &file) != 0 || ::clock_gettime(CLOCK_REALTIME, &now) != 0) return 0;
    return std::max(0.0, double(now.tv_sec - file.st_mtim.tv_sec) + 1e-9 * double(now.tv_nsec - file.st_mtim.tv_nsec));
  }
};

bool is_behind(const Membership& waiting, const PageRank& peer) {
  const PageRank& mine = *waiting.rank;
  if (waiting.page->has_phases) return int32_t(peer.phase - mine.waits_phase) < 0;
  return peer.newest < mine.waits_in;
}

// Members of the group that the rank sleeps for.
void fill_waits_on(Row& row, const Membership& waiting) {
  const PageRank& mine = *waiting.rank;
  if (mine.waits_for != 0) {
    const int peer = int(mine.waits_for >> 1) - 2;
    row.knows_on_whom = peer >= 0 && size_t(peer) < waiting.page->ranks.size();
    if (row.knows_on_whom) row.waits_on = {waiting.page->is_shared ? waiting.page->ranks[size_t(peer)].rank : peer};
    return;
  }
  row.knows_on_whom = waiting.page->is_shared;
  if (!row.knows_on_whom) return;
  for (const PageRank& peer : waiting.page->ranks) {
    if (&peer != &mine && is_behind(waiting, peer)) row.waits_on.push_back(peer.rank);
  }
  std::sort(row.waits_on.begin(), row.waits_on.end());
}

std::string peer_call_text(const Membership& waiting) {
  const uint32_t word = waiting.rank->waits_for;
  const int peer = int(word >> 1) - 2;
  const std::string whom = peer < 0 ? "any rank" : "rank " + std::to_string(peer);
  return (word & 1) != 0 ? "send to " + whom : "recv from " + whom;
}

void fill_waiting(Row& row, const Membership& waiting) {
  row.state = State::waiting;
  row.waits_seconds = seconds_since(waiting.rank->waits_since);
  fill_waits_on(row, waiting);
  row.place = place_of(*waiting.page, waiting.rank->waits_call);
  if (waiting.rank->waits_for != 0) {
    row.place = {.group = watch_page::group_text(waiting.page->group), .call = peer_call_text(waiting)};
  } else if (waiting.rank->waits_in == 0) {
    row.place = {.group = watch_page::group_text(waiting.page->group), .call = "new_group"};
  }
}

// The one that it sleeps in for the longest time, if there is one.
const Membership* find_waiting(const std::vector<Membership>& memberships) {
  const Membership* found = nullptr;
  for (const Membership& each : memberships) {
    if (each.rank->waits_since == 0 || seconds_since(each.rank->waits_since) < kNewsSeconds) continue;
    if (found == nullptr || each.rank->waits_since < found->rank->waits_since) found = &each;
  }
  return found;
}

// No call says when it was: the group that has called most since the last look, else most in all.
const Membership* find_busiest(const std::vector<Membership>& memberships, const Row* before) {
  const auto busyness = [&](const Membership& each) {
    const uint64_t now = each.rank->newest;
    const bool is_known = before != nullptr && before->counts.contains(each.page->file);
    const uint64_t last = is_known ? before->counts.at(each.page->file).calls : now;
    return std::pair(now - std::min(last, now), now);
  };
  const auto found =
      std::max_element(memberships.begin(), memberships.end(),
                       [&](const Membership& a, const Membership& b) { return busyness(a) < busyness(b); });
  return found == memberships.end() ? nullptr : &*found;
}

void fill_places(Row& row, const std::vector<Membership>& memberships, const Row* before) {
  for (const Membership& each : memberships) {
    row.counts[each.page->file] = {each.rank->newest, each.rank->num_steps};
    row.has_steps = row.has_steps || each.rank->num_steps > 0;
  }
  if (const Membership* waiting = find_waiting(memberships)) return fill_waiting(row, *waiting);
  if (const Membership* busiest = find_busiest(memberships, before)) {
    row.place = place_of(*busiest->page, busiest->rank->call);
    row.place.sequence = busiest->rank->newest;
  }
}

void fill_process(Row& row, const Process& process) {
  row.cpu_ticks = process.cpu_ticks;
  row.start_ticks = process.start_ticks;
  row.resident_bytes = process.resident_bytes;
  row.shared_bytes = process.shared_bytes;
  if (process.is_stopped()) row.state = State::stopped;
  if (process.has_ended()) row.state = State::gone;
}

void fill_rates(Row& row, const Row& before, double seconds) {
  if (seconds <= 0 || row.start_ticks != before.start_ticks) return;
  const double ticks = double(row.cpu_ticks) - double(before.cpu_ticks);
  row.cpu_percent = std::max(0.0, 100 * ticks / double(::sysconf(_SC_CLK_TCK)) / seconds);
  double calls = 0;
  double steps = 0;
  for (const auto& [file, now] : row.counts) {
    const auto last = before.counts.find(file);
    if (last == before.counts.end()) continue;
    calls += double(now.calls - std::min(last->second.calls, now.calls));
    steps += double(now.steps - std::min(last->second.steps, now.steps));
  }
  if (row.counts.empty()) return;
  row.calls_per_second = calls / seconds;
  if (row.has_steps) row.steps_per_second = steps / seconds;
}

const Row* find_row(const Snapshot* snapshot, const Row& wanted) {
  if (snapshot == nullptr) return nullptr;
  for (const Row& row : snapshot->rows) {
    if (row.rank == wanted.rank && row.thread == wanted.thread && row.pid == wanted.pid) return &row;
  }
  return nullptr;
}

/// The rows of one process: one, or one for each rank that is a thread of it.
std::vector<Row> rows_of(const Proc& proc, int rank, pid_t pid, const Published& published, const Snapshot* before) {
  std::map<int, std::vector<Membership>> by_thread;
  for (const Membership& each : published.of(pid)) by_thread[each.rank->rank].push_back(each);
  const bool are_threads = by_thread.size() > 1;
  if (by_thread.empty()) by_thread[rank] = {};
  const std::optional<Process> process = proc.process(pid);
  std::vector<Row> rows;
  for (const auto& [thread, memberships] : by_thread) {
    Row row{.rank = rank, .thread = are_threads ? thread : -1, .pid = pid};
    const Row* last = find_row(before, row);
    fill_places(row, memberships, last);
    const auto meeting = published.meetings.find(pid);
    if (meeting != published.meetings.end() && meeting->second.second >= kNewsSeconds && row.state != State::waiting) {
      row.state = State::waiting;
      row.place = {.call = meeting->second.first};
      row.waits_seconds = meeting->second.second;
      row.knows_on_whom = false;
    }
    if (process) fill_process(row, *process);
    if (!process) row.state = State::gone;
    if (last != nullptr && row.state != State::gone) {
      fill_rates(row, *last, std::chrono::duration<double>(Clock::now() - before->time).count());
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// Whoever is in new_group waits for all who are not: of this host, that is known.
void fill_meeting(Snapshot& snapshot) {
  std::vector<int> missing = snapshot.job.gone;
  for (const Row& row : snapshot.rows) {
    if (row.place.call != "new_group" && row.state != State::gone) missing.push_back(row.rank);
  }
  std::sort(missing.begin(), missing.end());
  for (Row& row : snapshot.rows) {
    if (row.state != State::waiting || row.place.call != "new_group" || row.knows_on_whom) continue;
    row.waits_on = missing;
    row.knows_on_whom = !missing.empty();
  }
}

}  // namespace

const char* state_text(State state) {
  switch (state) {
    case State::running: return "running";
    case State::waiting: return "waiting";
    case State::stopped: return "stopped";
    case State::gone: return "gone";
  }
  return "?";
}

Snapshot look(Proc& proc, const Job& job, const Snapshot* before) {
  Snapshot snapshot{.time = Clock::now(), .job = look_again(proc, job)};
  if (snapshot.job.has_ended) return snapshot;
  const Published published(proc, snapshot.job);
  for (const auto& [rank, pid] : snapshot.job.ranks) {
    for (Row& row : rows_of(proc, rank, pid, published, before)) snapshot.rows.push_back(std::move(row));
  }
  for (const int rank : snapshot.job.gone) snapshot.rows.push_back({.rank = rank, .state = State::gone});
  std::stable_sort(snapshot.rows.begin(), snapshot.rows.end(), [](const Row& a, const Row& b) {
    return std::pair(a.rank, a.thread) < std::pair(b.rank, b.thread);
  });
  fill_meeting(snapshot);
  std::map<std::string, std::string> failures;
  for (const auto& [file, page] : published.pages) {
    if (!page.failure.empty()) failures[watch_page::group_text(page.group)] = page.failure;
  }
  snapshot.notes = notes_of(snapshot, failures, published.problems);
  return snapshot;
}

}  // namespace serried::top
