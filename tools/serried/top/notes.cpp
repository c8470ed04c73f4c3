// One sentence for all ranks that wait for the same.
#include "tools/serried/top/notes.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "serried/base/text.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

std::string whole_call(const Place& place) {
  std::string text = place.part_of.empty() ? place.call : place.part_of + ": " + place.call;
  if (place.bytes >= 0) text += " (" + detail::bytes_text(place.bytes) + ")";
  return place.group.empty() ? text : text + " of group " + place.group;
}

int number_of(const Row& row) {
  return row.thread < 0 ? row.rank : row.thread;
}

const Row* find_rank(const Snapshot& snapshot, int rank) {
  const auto found =
      std::find_if(snapshot.rows.begin(), snapshot.rows.end(), [&](const Row& row) { return number_of(row) == rank; });
  return found == snapshot.rows.end() ? nullptr : &*found;
}

// What the one that is waited for does instead.
std::string excuse(const Snapshot& snapshot, int rank) {
  const Row* row = find_rank(snapshot, rank);
  const std::string who = "rank " + std::to_string(rank);
  if (row == nullptr) return who + " is not on this host";
  if (row->state == State::gone) return who + " is gone";
  if (row->state == State::stopped) {
    return who + " is stopped: kill -CONT " + std::to_string(row->pid) + " lets it go on";
  }
  if (row->place.call.empty()) return who + " shows no group yet";
  return who + (row->state == State::waiting ? " waits in " : " is at ") + row->place.call;
}

std::string excuses(const Snapshot& snapshot, const std::vector<int>& ranks) {
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i) text += "; " + excuse(snapshot, ranks[i]);
  return text;
}

void add_waits(const Snapshot& snapshot, std::vector<std::string>& notes) {
  std::map<std::tuple<std::string, std::vector<int>, bool>, std::vector<const Row*>> alike;
  for (const Row& row : snapshot.rows) {
    if (row.state == State::waiting) alike[{whole_call(row.place), row.waits_on, row.knows_on_whom}].push_back(&row);
  }
  for (const auto& [what, rows] : alike) {
    const auto& [call, whom, is_known] = what;
    std::vector<int> who;
    double seconds = 0;
    for (const Row* row : rows) {
      who.push_back(number_of(*row));
      seconds = std::max(seconds, row->waits_seconds);
    }
    std::sort(who.begin(), who.end());
    std::string note = ranks_text(who) + (who.size() == 1 ? " waits" : " wait") + " in " + call;
    if (!whom.empty()) note += " for " + ranks_text(whom);
    note += ", " + duration_text(seconds);
    if (!is_known) note += "; for whom is not published";
    notes.push_back(note + excuses(snapshot, whom));
  }
}

void add_stopped(const Snapshot& snapshot, std::vector<std::string>& notes) {
  std::set<int> told;
  for (const Row& row : snapshot.rows) told.insert(row.waits_on.begin(), row.waits_on.end());
  for (const Row& row : snapshot.rows) {
    if (row.state == State::stopped && !told.contains(number_of(row))) {
      notes.push_back(excuse(snapshot, number_of(row)));
    }
  }
}

void add_what_is_missing(const Snapshot& snapshot, std::vector<std::string>& notes) {
  std::vector<int> silent;
  for (const Row& row : snapshot.rows) {
    if (row.state != State::gone && row.counts.empty() && row.place.call.empty()) silent.push_back(row.rank);
  }
  if (!silent.empty()) {
    notes.push_back(ranks_text(silent) + (silent.size() == 1 ? " shows" : " show") +
                    " no group: none is made yet, or its backend or an older serried publishes nothing");
  }
  std::set<int> here;
  for (const Row& row : snapshot.rows) here.insert(row.rank);
  const int elsewhere = snapshot.job.world_size - int(here.size());
  if (elsewhere > 0) {
    notes.push_back(std::to_string(elsewhere) + " of " + std::to_string(snapshot.job.world_size) +
                    " ranks run on other hosts: look there with serried top");
  }
}

}  // namespace

std::vector<std::string> notes_of(const Snapshot& snapshot, const std::map<std::string, std::string>& failures,
                                  const std::map<int, std::string>& problems) {
  std::vector<std::string> notes;
  for (const auto& [group, failure] : failures) notes.push_back("group " + group + " has failed: " + failure);
  add_waits(snapshot, notes);
  add_stopped(snapshot, notes);
  for (const auto& [rank, problem] : problems) {
    notes.push_back("the memory of rank " + std::to_string(rank) + " cannot be read: " + problem);
  }
  add_what_is_missing(snapshot, notes);
  return notes;
}

}  // namespace serried::top
