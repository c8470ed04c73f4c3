// The state machine of a job.
#include "serried/launch/membership.h"

#include <algorithm>
#include <utility>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

// More than any host runs; the sum over all nodes has to stay a number.
constexpr int kMostLocalRanks = 1 << 16;

std::string nodes_text(int count) {
  return std::to_string(count) + (count == 1 ? " node" : " nodes");
}

// Of causes that come together: a job that is to end must not start again, and who is lost does not come back for a
// change. Ranks that fail while others are being ended may fail for that.
bool outweighs(const Cause& late, const Cause& first) {
  using Kind = Cause::Kind;
  if (late.kind == Kind::interrupted) return first.kind != Kind::interrupted && first.kind != Kind::launch_failed;
  return first.kind == Kind::changed && (late.kind == Kind::node_lost || late.kind == Kind::launch_failed);
}

}  // namespace

Membership::Membership(MembershipOptions options) : options_(std::move(options)), sit_out_(options_.sit_out) {}

bool Membership::has(int place) const {
  return std::any_of(members_.begin(), members_.end(), [&](const auto& m) { return m.second.place == place; });
}

bool Membership::any(State state) const {
  return std::any_of(members_.begin(), members_.end(), [&](const auto& m) { return m.second.state == state; });
}

std::string Membership::why_unfit(const Joiner& joiner) const {
  if (joiner.min_nodes != options_.min_nodes || joiner.max_nodes != options_.max_nodes) {
    return "this node was started with --nnodes " + range_text(joiner.min_nodes, joiner.max_nodes) +
           (options_.leader_is_apart ? ", the leader with --nnodes " : ", node 0 with --nnodes ") +
           range_text(options_.min_nodes, options_.max_nodes);
  }
  if (joiner.node_rank < -1 || joiner.node_rank >= options_.max_nodes) {
    return "there is no node-rank " + std::to_string(joiner.node_rank);
  }
  if (joiner.num_local < 1 || joiner.num_local > kMostLocalRanks) {
    return "it brings " + std::to_string(joiner.num_local) + " ranks";
  }
  return concluded_ ? "the job is at its end" : "";
}

std::string Membership::why_no_room(const Joiner& joiner) const {
  std::string hosts;
  for (const auto& [number, member] : members_) {
    if (member.place == joiner.node_rank) {
      return "--node-rank " + std::to_string(joiner.node_rank) + " is taken by " + member.host;
    }
    hosts += (hosts.empty() ? "" : ", ") + member.host;
  }
  if (num_members() < options_.max_nodes) return "";
  return "the job has all of its " + nodes_text(options_.max_nodes) + ": " + hosts;
}

int Membership::free_place(const Joiner& joiner) const {
  if (joiner.node_rank >= 0) return joiner.node_rank;
  for (const auto& [place, machine] : old_places_) {
    if (machine == joiner.machine && !has(place)) return place;
  }
  int place = 0;
  while (has(place)) ++place;
  return place;
}

Membership::Joined Membership::refused_command(const Joiner& joiner) {
  if (options_.command.digest.empty()) options_.command = joiner.command;
  if (joiner.command.digest == options_.command.digest) return {};
  return {.refusal = "this node was started to run \"" + joiner.command.text + "\", " +
                     (options_.leader_is_apart ? "the first one \"" : "node 0 \"") + options_.command.text + '"',
          .is_of_another_job = true};
}

Membership::Joined Membership::join(const Joiner& joiner, Time now) {
  if (const std::string refusal = why_unfit(joiner); !refusal.empty()) return {.refusal = refusal};
  if (const std::string refusal = why_no_room(joiner); !refusal.empty()) return {.refusal = refusal};
  if (Joined refused = refused_command(joiner); refused.is_of_another_job) return refused;
  const int number = next_member_++;
  const int place = free_place(joiner);
  members_[number] = {.place = place,
                      .node_rank = place,
                      .num_local = joiner.num_local,
                      .host = joiner.host,
                      .machine = joiner.machine};
  plan_change(now);
  tick(now);
  return {.member = number};
}

// Enough have come, or one more: how long others may still come with it.
void Membership::plan_change(Time now) {
  if (num_members() < options_.min_nodes) return;
  if (num_members() == options_.max_nodes) change_at_ = now;
  if (change_at_ != kNever) return;
  change_at_ = now + std::chrono::duration_cast<Clock::duration>(options_.last_call);
}

void Membership::tick(Time now) {
  now_ = now;
  if (taking_over() && (all_have_come() || now >= take_over_by_)) finish_take_over(now);
  give_up_on_nodes(now);
  if (now >= back_at_) {
    change_at_ = std::min(change_at_, now);
    back_at_ = sit_out_.next_back(now);
  }
  if (now < change_at_ || cause_ || concluded_ || taking_over()) return;
  change_at_ = kNever;
  if (!started()) return start("");
  // Who has finished would have to do it all again: a job that ends is left to its end.
  if (any(State::done) || any_rank_done_) return;
  if (options_.keep_going) return grow();
  std::string hosts;
  for (const auto& [number, member] : members_) {
    if (member.state == State::waiting && !sits_out(number, now)) hosts += (hosts.empty() ? "" : ", ") + member.host;
  }
  if (!hosts.empty()) stop({.kind = Cause::Kind::changed, .host = hosts});
}

// Who leads may not leave. A launcher that is started again at its place is the same node.
bool Membership::sits_out(int number, Time now) const {
  const Member& member = members_.at(number);
  const bool leads = number == 0 && !options_.leader_is_apart;
  return !leads && sit_out_.sits_out(member.machine + "/" + std::to_string(member.place), now);
}

void Membership::note_failure(int number) {
  const Member& member = members_.at(number);
  sit_out_.failed(member.machine + "/" + std::to_string(member.place), now_);
  back_at_ = sit_out_.next_back(now_);
}

// By place. Nobody sits out where there would be too few.
std::map<int, int> Membership::who_takes_part() const {
  std::map<int, int> by_place;
  int num_left = num_members();
  for (const auto& [number, member] : members_) {
    if (num_left > options_.min_nodes && sits_out(number, now_)) {
      --num_left;
    } else {
      by_place[member.place] = number;
    }
  }
  return by_place;
}

// Those that take no part, whose launchers must not wait for an order any more: what to tell of them.
std::string Membership::leave_out(const std::map<int, int>& by_place) {
  std::string text;
  for (auto& [number, member] : members_) {
    if (by_place.contains(member.place) || member.state == State::waiting) continue;
    member.state = State::waiting;
    member.num_owed = 0;
    const std::string word = sit_out_.text(member.host);
    orders_.push_back({number, {.kind = Order::Kind::wait, .assignment = {.news = word}}});
    text += "; " + word;
  }
  return text;
}

Assignment Membership::assignment_of(const std::map<int, int>& by_place, const std::string& news) {
  int world_size = 0;
  for (const auto& [place, number] : by_place) world_size += members_.at(number).num_local;
  master_port_ = options_.new_master_port();
  return {.attempt = generation_,
          .max_restarts = options_.max_restarts,
          .world_size = world_size,
          .num_nodes = static_cast<int>(by_place.size()),
          .master_port = master_port_,
          .run_id = options_.run_id,
          .job_secret = options_.job_secret,
          .news = news,
          .keep_going = options_.keep_going,
          .restarts = restarts_};
}

void Membership::start(const std::string& news) {
  ++generation_;
  cause_.reset();
  change_at_ = kNever;
  const std::map<int, int> by_place = who_takes_part();
  const std::string left_out = leave_out(by_place);
  Order order{.kind = Order::Kind::start, .assignment = assignment_of(by_place, news + left_out)};
  int node_rank = 0;
  int first_rank = 0;
  std::vector<Seats::Node> nodes;
  for (const auto& [place, number] : by_place) nodes.push_back({number, members_.at(number).num_local});
  if (options_.keep_going) seats_.begin(nodes);
  any_rank_done_ = wants_to_grow_ = short_of_nodes_ = must_renew_ = false;
  order.assignment.next_seat = seats_.next();
  order.assignment.num_with_leader = options_.leader_is_apart ? 0 : seats_.num_seats_of(0);
  for (const auto& [place, number] : by_place) {
    Member& member = members_.at(number);
    member.state = State::running;
    member.num_owed = 0;
    member.node_rank = node_rank++;
    order.assignment.node_rank = member.node_rank;
    order.assignment.num_local = member.num_local;
    order.assignment.seats = seats_.of(number);
    order.assignment.first_rank = std::exchange(first_rank, first_rank + member.num_local);
    orders_.push_back({number, order});
  }
  tell_leader(order);
}

void Membership::done(int member) {
  State& state = members_.at(member).state;
  if (state != State::running) return;
  state = State::done;
  if (!concluded_ && !cause_ && !any(State::running)) conclude(0);
}

void Membership::failed(int member, Cause cause) {
  const Member& entry = members_.at(member);
  if (started() && entry.state == State::waiting) return;
  if (cause.kind == Cause::Kind::rank_failed && started() && !cause_) note_failure(member);
  cause.node = entry.node_rank;
  cause.host = entry.host;
  stop(cause);
}

void Membership::stop(Cause cause) {
  if (concluded_) return;
  const bool may_start_again = restarts_ < options_.max_restarts && num_members() >= options_.min_nodes;
  cause.goes_on = cause.kind == Cause::Kind::changed || (cause.kind == Cause::Kind::node_lost && may_start_again);
  const bool was_stopping = cause_.has_value();
  take_over_by_ = kNever;
  if (!was_stopping || outweighs(cause, *cause_)) cause_ = cause;
  if (was_stopping) return;
  for (auto& [number, member] : members_) {
    if (started() && member.state == State::waiting) continue;
    member.state = State::stopping;
    orders_.push_back({number, {.kind = Order::Kind::stop, .cause = cause}});
  }
  tell_leader({.kind = Order::Kind::stop, .cause = cause});
  if (!started()) conclude(exit_code(cause));
}

void Membership::ended(int member) {
  State& state = members_.at(member).state;
  if (state != State::stopping) return;
  state = State::ended;
  conclude_if_all_ended();
}

void Membership::lost(int member, const std::string& why) {
  const Member gone = members_.at(member);
  members_.erase(member);
  if (concluded_) return;
  old_places_[gone.place] = gone.machine;
  // Nobody that a last call would be for.
  if (started() ? !any(State::waiting) : num_members() < options_.min_nodes) change_at_ = kNever;
  if (gone.state == State::waiting) return;
  if (taking_over()) {  // it may come again
    claims_.erase(member);
    std::erase_if(meanwhile_, [&](const End& end) { return end.member == member; });
    return;
  }
  const Cause cause{.kind = Cause::Kind::node_lost, .node = gone.node_rank, .host = gone.host, .text = why};
  seats_.remove_member(member);
  keeps_going() ? go_on_without(cause, -1) : stop(cause);
  conclude_if_all_ended();  // nobody may be left who is to stop
}

void Membership::conclude_if_all_ended() {
  using Kind = Cause::Kind;
  if (concluded_ || !cause_ || any(State::stopping)) return;
  const bool enough = num_members() >= options_.min_nodes;
  const std::string what = ": all ranks start again";
  const std::string on =
      options_.min_nodes < options_.max_nodes ? " on " + nodes_text(static_cast<int>(who_takes_part().size())) : "";
  if (enough && cause_->kind == Kind::changed) return start("the nodes are others" + what + on);
  const bool failure = cause_->kind == Kind::rank_failed || cause_->kind == Kind::node_lost;
  if (enough && failure && restarts_ < options_.max_restarts) {
    ++restarts_;
    return start("restart " + std::to_string(restarts_) + " of " + std::to_string(options_.max_restarts) + what + on);
  }
  conclude(exit_code(*cause_));
}

void Membership::conclude(int exit_code) {
  concluded_ = true;
  change_at_ = enough_by_ = take_over_by_ = kNever;
  for (const auto& [number, member] : members_) {
    orders_.push_back({number, {.kind = Order::Kind::exit, .exit_code = exit_code}});
  }
  tell_leader({.kind = Order::Kind::exit, .exit_code = exit_code});
}

// Also where no member is left to be told.
void Membership::tell_leader(Order order) {
  if (!options_.leader_is_apart) return;
  order.assignment.node_rank = kLeader;
  order.assignment.num_local = 0;
  order.assignment.seats.clear();
  orders_.push_back({kLeader, std::move(order)});
}

std::vector<MemberOrder> Membership::take_orders() {
  return std::exchange(orders_, {});
}

std::vector<int> Membership::missing() const {
  std::vector<int> result;
  for (int place = 0; place < options_.max_nodes; ++place) {
    if (!has(place)) result.push_back(place);
  }
  return result;
}

std::vector<int> Membership::still_ending() const {
  std::vector<int> result;
  for (const auto& [number, member] : members_) {
    if (member.state == State::stopping) result.push_back(number);
  }
  return result;
}

}  // namespace serried::launch
