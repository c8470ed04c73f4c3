// The state machine of a job under --keep-going: one table of ranks after another, while its processes live on.
#include <algorithm>
#include <utility>

#include "serried/launch/error.h"
#include "serried/launch/membership.h"

namespace serried::launch {
namespace {

std::string ranks_text(int count) {
  return std::to_string(count) + (count == 1 ? " rank" : " ranks");
}

}  // namespace

void Membership::rank_is_elastic(int member, int seat) {
  if (taking_over()) return meanwhile_.push_back({member, seat, End::Kind::elastic});
  if (!keeps_going() || !seats_.has(member, seat)) return;
  seats_.say_elastic(seat);
  if (wants_to_grow_) grow();
  renew();
}

void Membership::rank_done(int member, int seat) {
  if (taking_over()) return meanwhile_.push_back({member, seat, End::Kind::done});
  if (!keeps_going() || !seats_.has(member, seat)) return;
  seats_.remove(seat);
  any_rank_done_ = true;
  if (seats_.empty()) conclude(0);
}

void Membership::rank_lost(int member, int seat, Cause cause) {
  if (taking_over()) return meanwhile_.push_back({member, seat, End::Kind::lost, std::move(cause)});
  if (!keeps_going() || !seats_.has(member, seat)) return;
  const Member& entry = members_.at(member);
  cause.rank = seats_.rank_of(seat);
  cause.node = entry.node_rank;
  cause.host = entry.host;
  seats_.remove(seat);
  note_failure(member);
  go_on_without(std::move(cause), member);
}

// `member_with_room`: where a rank may be started in the place of the one that was lost; -1: nowhere.
void Membership::go_on_without(Cause cause, int member_with_room) {
  if (seats_.empty()) return stop(std::move(cause));
  if (const int rank = seats_.first_not_elastic(); rank >= 0) {
    cause.note = "--keep-going keeps nobody: rank " + std::to_string(rank) +
                 " has not made a serried::Elastic by now, so all ranks are ended";
    return stop(std::move(cause));
  }
  const int num_left = seats_.num_seats();
  const bool enough = num_members() >= options_.min_nodes;
  // Who has finished would have to do it all again: a job that ends gets nobody new.
  const bool again = member_with_room >= 0 && restarts_ < options_.max_restarts && !any_rank_done_;
  const bool later = again && sits_out(member_with_room, now_) &&
                     num_nodes_with_ranks() - (seats_.num_seats_of(member_with_room) > 0) >= options_.min_nodes;
  cause.goes_on = true;
  cause.note = "the other " + ranks_text(num_left) +
               (num_left == 1 ? (enough ? " goes on" : " waits") : (enough ? " go on" : " wait")) +
               (enough ? "" : " for more nodes") +
               (later   ? "; " + sit_out_.text(members_.at(member_with_room).host)
                : again ? ", and it is started again"
                        : "");
  tell_over(cause);
  if (again) ++restarts_;
  if (later) ++members_.at(member_with_room).num_owed;
  if (again && !later) seats_.add(member_with_room);
  if (num_nodes_with_ranks() < options_.min_nodes) give_back(true);
  short_of_nodes_ = !enough;
  if (enough) publish("");
}

void Membership::tell_over(const Cause& cause) {
  for (const auto& [number, member] : members_) {
    if (member.state != State::running) continue;
    orders_.push_back({number, {.kind = Order::Kind::over, .assignment = {.attempt = generation_}, .cause = cause}});
  }
  tell_leader({.kind = Order::Kind::over, .assignment = {.attempt = generation_}, .cause = cause});
}

int Membership::num_nodes_with_ranks() const {
  return static_cast<int>(
      std::count_if(members_.begin(), members_.end(), [&](const auto& m) { return seats_.num_seats_of(m.first) > 0; }));
}

// To nodes that sit out no more, the ranks they were not given meanwhile. The hosts of these.
std::string Membership::give_back(bool also_who_sits_out) {
  std::string hosts;
  for (auto& [number, member] : members_) {
    if (member.num_owed == 0 || any_rank_done_ || (!also_who_sits_out && sits_out(number, now_))) continue;
    for (; member.num_owed > 0; --member.num_owed) seats_.add(number);
    hosts += (hosts.empty() ? "" : ", ") + member.host;
  }
  return hosts;
}

// Of nodes that have come. Ranks that may not know of tables are left alone.
void Membership::grow() {
  wants_to_grow_ = seats_.first_not_elastic() >= 0;
  if (wants_to_grow_ || any_rank_done_) return;
  if (num_members() < options_.min_nodes) return;  // one was lost meanwhile; the next that comes makes them enough
  std::string hosts = give_back(false);
  for (auto& [number, member] : members_) {
    if (member.state != State::waiting || (sits_out(number, now_) && !short_of_nodes_)) continue;
    member.state = State::running;
    hosts += (hosts.empty() ? "" : ", ") + member.host;
    for (int i = 0; i < member.num_local; ++i) seats_.add(number);
  }
  short_of_nodes_ = false;
  enough_by_ = kNever;
  if (!hosts.empty()) publish("the job grows by " + hosts);
}

void Membership::publish(const std::string& news) {
  ++generation_;
  must_renew_ = false;
  seats_.number_anew();
  std::map<int, int> by_place;
  for (const auto& [number, member] : members_) {
    if (seats_.num_seats_of(number) > 0) by_place[member.place] = number;
  }
  Order order{.kind = Order::Kind::table,
              .assignment = {.attempt = generation_, .max_restarts = options_.max_restarts}};
  order.assignment.world_size = seats_.num_seats();
  order.assignment.num_nodes = static_cast<int>(by_place.size());
  order.assignment.master_port = master_port_;
  order.assignment.run_id = options_.run_id;
  order.assignment.job_secret = options_.job_secret;
  order.assignment.keep_going = true;
  order.assignment.restarts = restarts_;
  order.assignment.next_seat = seats_.next();
  order.assignment.num_with_leader = options_.leader_is_apart ? 0 : seats_.num_seats_of(0);
  if (!news.empty()) order.assignment.news = news + ": " + ranks_text(seats_.num_seats());
  int node_rank = 0;
  for (const auto& [place, number] : by_place) {
    members_.at(number).node_rank = node_rank;
    order.assignment.node_rank = node_rank++;
    order.assignment.seats = seats_.of(number);
    order.assignment.num_local = static_cast<int>(order.assignment.seats.size());
    order.assignment.first_rank = order.assignment.seats.front().rank;
    orders_.push_back({number, order});
  }
  tell_leader(order);
}

// There are fewer than there must be, and no other comes.
void Membership::give_up_on_nodes(Time now) {
  if (!short_of_nodes_ || !keeps_going()) {
    enough_by_ = kNever;
    return;
  }
  if (enough_by_ == kNever) enough_by_ = now + std::chrono::duration_cast<Clock::duration>(options_.join_timeout);
  if (now < enough_by_) return;
  stop({.kind = Cause::Kind::launch_failed,
        .exit_code = kExitFailure,
        .text = "[run] " + std::to_string(num_members()) + " of at least " + std::to_string(options_.min_nodes) +
                " nodes are left, and no other joined within " + to_text(options_.join_timeout) +
                "\n  fix: start a launcher on another node, pass a smaller --nnodes min:max, or raise --join-timeout"});
}

}  // namespace serried::launch
