// When to look, to tell and to ask. Nothing is sent while nobody waits.
#include "serried/launch/lookout.h"

#include <algorithm>
#include <stdexcept>

#include "serried/launch/seen_json.h"
#include "serried/launch/socket.h"
#include "serried/launch/version.h"

namespace serried::launch {
namespace {

constexpr size_t kMostPlaces = 1 << 19;  // of what a message may hold
constexpr Clock::duration kBetweenWords = std::chrono::seconds(1);

}  // namespace

void Lookout::begin(const Assignment& assignment) {
  end();
  assignment_ = assignment;
  if (slow_after_.count() > 0) next_look_ = Clock::now() + kBetweenLooks;
}

void Lookout::end() {
  next_look_ = kNever;
  first_ask_ = kNever;
  next_tell_ = next_ask_ = Time();
  places_.clear();
  stalls_.forget();
}

HostSeen Lookout::seen(const LocalRanks& ranks) const {
  const int64_t now = monotonic_ns();
  return {.version = version_text(),
          .host = host_name(),
          .node = assignment_.node_rank,
          .job = assignment_.run_id,
          .attempt = assignment_.attempt,
          .world_size = assignment_.world_size,
          .now_ns = now,
          .ranks = ranks.seen(now, slow_ns() / 2)};
}

bool Lookout::any_waits(const LocalRanks& ranks) const {
  const int64_t now = monotonic_ns();
  const std::map<int, const BlackBox*> boxes = ranks.boxes();
  return std::any_of(boxes.begin(), boxes.end(), [&](const auto& box) { return box.second->may_wait(now, slow_ns()); });
}

// "" where it is longer than launchers tell each other: of so many groups nobody wants to hear.
std::string Lookout::places_text(const LocalRanks& ranks) const {
  HostSeen all = seen(ranks);
  for (RankSeen& rank : all.ranks) std::erase_if(rank.groups, [](const GroupSeen& group) { return group.closed; });
  std::string text = to_json(all);
  return text.size() <= kMostPlaces ? text : "";
}

void Lookout::hear(PlacesMail& mail, Time now) {
  for (const auto& [member, text] : std::exchange(mail.received, {})) {
    try {
      HostSeen seen = host_seen_from(text);
      const bool is_of_now = seen.job == assignment_.run_id && seen.attempt == assignment_.attempt;
      if (is_of_now) places_[member] = {std::move(seen), now};
    } catch (const std::runtime_error&) {  // a launcher of the same version that is out of its mind
    }
  }
}

bool Lookout::tells(PlacesMail& mail, bool waits, Time now) {
  const bool asked = std::exchange(mail.asked, false);
  if (!asked && (!waits || now < next_tell_)) return false;
  next_tell_ = now + kBetweenWords;
  return true;
}

bool Lookout::others_wait() const {
  const auto waits = [](const GroupSeen& group) { return !group.open.empty(); };
  return std::any_of(places_.begin(), places_.end(), [&](const auto& place) {
    const std::vector<RankSeen>& ranks = place.second.seen.ranks;
    return std::any_of(ranks.begin(), ranks.end(), [&](const RankSeen& rank) {
      return std::any_of(rank.groups.begin(), rank.groups.end(), waits);
    });
  });
}

bool Lookout::asks(bool waits, Time now) {
  if (!waits && !others_wait() && stalls_.empty()) {
    first_ask_ = kNever;
    return false;
  }
  if (now < next_ask_) return false;
  next_ask_ = now + kBetweenWords;
  if (first_ask_ == kNever) first_ask_ = now;
  return true;
}

std::vector<std::string> Lookout::lines(const LocalRanks* ranks, size_t num_others, bool waits, Time now) {
  if (!waits && !others_wait() && stalls_.empty()) return {};
  size_t num_told = 0;
  std::vector<HostSeen> hosts;
  if (ranks != nullptr) hosts.push_back(seen(*ranks));
  for (const auto& [member, place] : places_) {
    hosts.push_back(place.seen);
    hosts.back().now_ns += std::chrono::nanoseconds(now - place.received_at).count();
    num_told += first_ask_ != kNever && place.received_at >= first_ask_ ? 1 : 0;
  }
  // The others answer at once, unless they are gone, which is told elsewhere.
  if (num_told < num_others && now < first_ask_ + kBetweenWords) return {};
  return stalls_.update(find_stalls(hosts, slow_after_));
}

}  // namespace serried::launch
