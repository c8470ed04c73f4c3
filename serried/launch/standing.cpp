// A table, and who of it has ended.
#include "serried/launch/standing.h"

#include <algorithm>
#include <string>

namespace serried::launch {

void Standing::hear(const Order& order) {
  using Kind = Order::Kind;
  if (order.kind == Kind::over) return;  // the next table follows, by this leader or by another
  if (order.kind == Kind::start) *this = {};
  if (order.kind != Kind::start && order.kind != Kind::table) return table_.reset();
  if (!order.assignment.keep_going) return table_.reset();
  table_ = order.assignment;
  // In the place of one that was lost, or with a node that came: who lives beside it uses Elastic, so it will.
  for (const Seat& seat : table_->seats) {
    if (seat.fresh && order.kind == Kind::table) elastic_.insert(seat.number);
  }
  const auto is_in_table = [&](int number) {
    return std::any_of(table_->seats.begin(), table_->seats.end(), [&](const Seat& s) { return s.number == number; });
  };
  std::erase_if(ended_, [&](const auto& entry) { return !is_in_table(entry.first); });
}

void Standing::rank_done(int seat) {
  ended_[seat] = std::nullopt;
  any_done_ = true;
}

bool Standing::is_broken_without_leader() const {
  return table_->num_with_leader > 0 ||
         std::any_of(ended_.begin(), ended_.end(), [](const auto& entry) { return entry.second.has_value(); });
}

bool Standing::is_done() const {
  return any_done_ && std::all_of(table_->seats.begin(), table_->seats.end(), [&](const Seat& seat) {
           const auto found = ended_.find(seat.number);
           return found != ended_.end() && !found->second;
         });
}

Claim Standing::claim(bool leader_was_apart) const {
  Claim claim{.run_id = table_->run_id,
              .job_secret = table_->job_secret,
              .generation = table_->attempt,
              .world_size = table_->world_size,
              .num_nodes = table_->num_nodes,
              .node_rank = table_->node_rank,
              .num_with_leader = table_->num_with_leader,
              .leader_was_apart = leader_was_apart,
              .restarts = table_->restarts,
              .next_seat = table_->next_seat,
              .master_host = table_->master_host,
              .master_port = table_->master_port,
              .any_done = any_done_};
  for (const Seat& seat : table_->seats) {
    claim.seats.push_back({.number = seat.number,
                           .rank = seat.rank,
                           .elastic = elastic_.contains(seat.number),
                           .lives = !ended_.contains(seat.number)});
  }
  return claim;
}

std::vector<Message> Standing::ends() const {
  std::vector<Message> messages;
  for (const auto& [seat, cause] : ended_) {
    messages.push_back(cause ? lost_message(seat, *cause) : done_message(seat));
  }
  return messages;
}

Message done_message(int seat) {
  return {"rank_done", std::to_string(seat)};
}

Message lost_message(int seat, const Cause& cause) {
  Message message = to_fields(cause);
  message.insert(message.begin(), {"rank_lost", std::to_string(seat)});
  return message;
}

}  // namespace serried::launch
