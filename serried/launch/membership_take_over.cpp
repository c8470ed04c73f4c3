// The state machine of a leader that is started while the ranks of its job live: it learns from their launchers where
// they are, and goes on from there.
#include <algorithm>
#include <set>
#include <utility>

#include "serried/launch/error.h"
#include "serried/launch/membership.h"

namespace serried::launch {

std::string Membership::why_no_claim(const Claim& claim) const {
  if (!options_.keep_going)
    return "the ranks of this node live on under --keep-going, and this leader was started without";
  if (claim.leader_was_apart == options_.leader_is_apart) return "";
  return claim.leader_was_apart
             ? "the ranks of this node were led by serried rendezvous, and this leader is a serried run"
             : "the ranks of this node were led by a serried run, and this leader is a serried rendezvous";
}

// Two tables of one generation, or two that go on from one, must never be.
std::string Membership::why_too_late(const Claim& claim) const {
  if (!started()) return "";
  if (cause_) return "the job is being ended";
  if (claim.run_id != options_.run_id) {
    return "the ranks of this node are of another run of this job, " + claim.run_id + ", and run " + options_.run_id +
           " is led here";
  }
  if (taking_over() || !any_lives(claim)) return "";
  const std::string own = "the ranks of this node are of generation " + std::to_string(claim.generation);
  if (generation_ <= claim.generation) return own + ", in which the job goes on without this node";
  return own + ", and the job has gone on without this node to generation " + std::to_string(generation_);
}

Membership::Joined Membership::rejoin(const Joiner& joiner, const Claim& claim, Time now) {
  if (const std::string refusal = why_unfit(joiner); !refusal.empty()) return {.refusal = refusal};
  if (const std::string refusal = why_no_claim(claim); !refusal.empty()) return {.refusal = refusal};
  if (Joined refused = refused_command(joiner); refused.is_of_another_job) return refused;
  if (const std::string refusal = why_too_late(claim); !refusal.empty()) {
    return {.refusal = refusal, .is_final = true};
  }
  // Of places only the order in a table of new processes depends, so nobody is refused for one.
  int place = joiner.node_rank >= 0 ? joiner.node_rank : claim.node_rank;
  if (has(place)) place = 0;
  while (has(place)) ++place;
  const int number = next_member_++;
  members_[number] = {.state = State::running,
                      .place = place,
                      .node_rank = claim.node_rank,
                      .num_local = joiner.num_local,
                      .host = joiner.host,
                      .machine = joiner.machine};
  if (started() && !taking_over()) return {.member = number};  // none of its ranks is left: it stays to the end
  claims_[number] = claim;
  learn(claim, now);
  tick(now);
  return {.member = number};
}

void Membership::learn(const Claim& claim, Time now) {
  if (!started()) {
    take_over_by_ = now + std::chrono::duration_cast<Clock::duration>(options_.claims_within);
    options_.run_id = claim.run_id;
    options_.job_secret = claim.job_secret;
  }
  generation_ = std::max(generation_, claim.generation);
  restarts_ = std::max(restarts_, claim.restarts);
  seats_.begin_numbers_at(claim.next_seat);
  any_rank_done_ = any_rank_done_ || claim.any_done;
  if (claim.generation == generation_) master_port_ = claim.master_port;
}

// Ranks of the newest table whose launchers are there.
int Membership::num_claimed() const {
  size_t count = 0;
  for (const auto& [number, claim] : claims_) {
    if (claim.generation == generation_) count += claim.seats.size();
  }
  return static_cast<int>(count);
}

// How its ranks have ended comes behind the claim.
bool Membership::has_told_all(const Claim& claim) const {
  return claim.generation != generation_ ||
         std::all_of(claim.seats.begin(), claim.seats.end(), [&](const ClaimedSeat& seat) {
           const auto is_it = [&](const End& end) { return end.seat == seat.number && end.kind != End::Kind::elastic; };
           return seat.lives || std::any_of(meanwhile_.begin(), meanwhile_.end(), is_it);
         });
}

bool Membership::all_have_come() const {
  const auto tells = [&](const auto& entry) { return has_told_all(entry.second); };
  if (!std::all_of(claims_.begin(), claims_.end(), tells)) return false;
  return std::any_of(claims_.begin(), claims_.end(), [&](const auto& entry) {
    const Claim& claim = entry.second;
    return claim.generation == generation_ && num_claimed() + claim.num_with_leader >= claim.world_size;
  });
}

void Membership::finish_take_over(Time now) {
  take_over_by_ = kNever;
  refuse_old_claims();
  refuse_who_is_too_many();
  restore_seats();
  must_renew_ = true;
  short_of_nodes_ = num_members() < options_.min_nodes;
  const std::optional<Cause> missing = who_did_not_come();
  claims_.clear();
  if (missing) go_on_without(*missing, -1);
  tell_what_happened_meanwhile();
  renew();
  if (any(State::waiting)) change_at_ = now;
  conclude_if_all_ended();
}

void Membership::refuse_old_claims() {
  for (const auto& [number, claim] : claims_) {
    if (claim.generation == generation_ || !any_lives(claim)) continue;
    refused_.push_back({number, members_.at(number).host,
                        "the ranks of this node are of generation " + std::to_string(claim.generation) +
                            ", and others of the job of generation " + std::to_string(generation_)});
    members_.erase(number);
  }
}

// Those that came anew while the nodes of the job were awaited.
void Membership::refuse_who_is_too_many() {
  for (auto at = members_.rbegin(); at != members_.rend() && num_members() > options_.max_nodes;) {
    const auto [number, member] = *at;
    const bool leads = number == 0 && !options_.leader_is_apart;
    if (leads || member.state != State::waiting) {
      ++at;
      continue;
    }
    refused_.push_back({number, member.host,
                        "the job has all of its " + std::to_string(options_.max_nodes) + " nodes: they came back"});
    at = std::make_reverse_iterator(members_.erase(std::next(at).base()));
  }
}

void Membership::restore_seats() {
  for (const auto& [number, claim] : claims_) {
    if (claim.generation != generation_ || !members_.contains(number)) continue;
    for (const ClaimedSeat& seat : claim.seats) seats_.restore(number, seat.number, seat.rank, seat.elastic);
  }
}

// The leader's own ranks went with it.
std::optional<Cause> Membership::who_did_not_come() const {
  std::set<int> nodes;
  const Claim* newest = nullptr;
  for (const auto& [number, claim] : claims_) {
    if (claim.generation != generation_) continue;
    newest = &claim;
    nodes.insert(claim.node_rank);
  }
  Cause cause{.kind = Cause::Kind::node_lost, .text = "it did not come back to the leader"};
  if (newest == nullptr) return cause;
  if (newest->num_with_leader > 0) nodes.insert(0);
  while (nodes.contains(cause.node)) ++cause.node;
  if (num_claimed() + newest->num_with_leader < newest->world_size) return cause;
  if (newest->num_with_leader == 0) return std::nullopt;
  return Cause{.kind = Cause::Kind::node_lost, .host = members_.at(0).host, .text = "it was started again"};
}

void Membership::tell_what_happened_meanwhile() {
  for (End& end : std::exchange(meanwhile_, {})) {
    if (!members_.contains(end.member)) continue;
    if (end.kind == End::Kind::elastic) rank_is_elastic(end.member, end.seat);
    if (end.kind == End::Kind::done) rank_done(end.member, end.seat);
    if (end.kind == End::Kind::lost) rank_lost(end.member, end.seat, std::move(end.cause));
  }
}

// What ranks told each other through the store is gone with the leader before: in the next table it is told anew.
// Ranks that may not know of tables are left alone.
void Membership::renew() {
  if (!must_renew_ || !keeps_going() || short_of_nodes_ || seats_.first_not_elastic() >= 0) return;
  publish("a leader is at its place again");
}

}  // namespace serried::launch
