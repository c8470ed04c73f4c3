// A launcher's look at what its ranks do: four times a second, without asking them, and with other launchers where
// some ranks wait for long.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/plan.h"
#include "serried/launch/ranks.h"
#include "serried/launch/waiting.h"

namespace serried::launch {

/// What launchers tell each other of their ranks, between the link to them and the lookout.
struct PlacesMail {
  bool asked = false;                                      // the leader wants to know now
  std::vector<std::pair<int, std::string>> received = {};  // by the leader: from which member, as JSON
};

class Lookout {
 public:
  explicit Lookout(Seconds slow_after) : slow_after_(slow_after) {}

  /// The ranks of an attempt have started, or have been told to end.
  void begin(const Assignment& assignment);
  void end();

  Time deadline() const { return next_look_; }

  /// Call it in every turn. What there is to say; the leader says it for all nodes.
  template <class Link>
  std::vector<std::string> turn(const LocalRanks& ranks, Link& link) {
    const Time now = Clock::now();
    hear(link.places(), now);
    if (now < next_look_ && !link.places().asked) return {};
    if (now >= next_look_) next_look_ = now + kBetweenLooks;
    const bool waits = any_waits(ranks);
    if (tells(link.places(), waits, now)) link.send_places(places_text(ranks));
    if (!link.is_leader()) return {};
    if (asks(waits, now)) link.ask_for_places();
    return lines(&ranks, link.num_others(), waits, now);
  }

  /// The same of a leader without ranks.
  template <class Link>
  std::vector<std::string> turn_without_ranks(Link& link) {
    const Time now = Clock::now();
    hear(link.places(), now);
    if (now < next_look_) return {};
    next_look_ = now + kBetweenLooks;
    if (asks(false, now)) link.ask_for_places();
    return lines(nullptr, link.num_others(), false, now);
  }

  /// What is to be said of this node's ranks now; GroupSeen::open has what lasts for half of slow_after.
  HostSeen seen(const LocalRanks& ranks) const;

 private:
  static constexpr Clock::duration kBetweenLooks = std::chrono::milliseconds(250);

  struct Place {
    HostSeen seen;
    Time received_at;
  };

  int64_t slow_ns() const { return std::chrono::duration_cast<std::chrono::nanoseconds>(slow_after_).count(); }
  bool any_waits(const LocalRanks& ranks) const;
  std::string places_text(const LocalRanks& ranks) const;
  void hear(PlacesMail& mail, Time now);
  bool tells(PlacesMail& mail, bool waits, Time now);
  bool asks(bool waits, Time now);
  std::vector<std::string> lines(const LocalRanks* ranks, size_t num_others, bool waits, Time now);
  bool others_wait() const;

  Seconds slow_after_;
  Assignment assignment_{};
  Time next_look_ = kNever;
  Time next_tell_{};
  Time next_ask_{};
  Time first_ask_ = kNever;      // of a stall
  std::map<int, Place> places_;  // of other nodes, by member
  StallLines stalls_;
};

}  // namespace serried::launch
