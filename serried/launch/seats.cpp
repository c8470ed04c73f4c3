// Seats by number; a table is their order.
#include "serried/launch/seats.h"

#include <algorithm>
#include <utility>

namespace serried::launch {

void Seats::begin(const std::vector<Node>& nodes) {
  seats_.clear();
  int rank = 0;
  for (const Node& node : nodes) {
    for (int i = 0; i < node.num_local; ++i) seats_[next_++] = {.member = node.member, .rank = rank++};
  }
}

void Seats::add(int member) {
  seats_[next_++] = {.member = member, .elastic = true};
}

void Seats::restore(int member, int number, int rank, bool elastic) {
  seats_[number] = {.member = member, .rank = rank, .fresh = false, .elastic = elastic};
}

void Seats::remove_member(int member) {
  std::erase_if(seats_, [&](const auto& entry) { return entry.second.member == member; });
}

void Seats::say_elastic(int seat) {
  const auto found = seats_.find(seat);
  if (found != seats_.end()) found->second.elastic = true;
}

void Seats::number_anew() {
  std::vector<std::pair<std::pair<bool, int>, int>> order;  // newcomers last, as they came
  for (const auto& [number, seat] : seats_) {
    const bool is_new = seat.rank < 0;
    order.push_back({{is_new, is_new ? number : seat.rank}, number});
  }
  std::sort(order.begin(), order.end());
  for (size_t rank = 0; rank < order.size(); ++rank) {
    Entry& seat = seats_.at(order[rank].second);
    seat.fresh = seat.rank < 0;
    seat.rank = static_cast<int>(rank);
  }
}

bool Seats::has(int member, int seat) const {
  const auto found = seats_.find(seat);
  return found != seats_.end() && found->second.member == member;
}

int Seats::num_seats_of(int member) const {
  return static_cast<int>(
      std::count_if(seats_.begin(), seats_.end(), [&](const auto& entry) { return entry.second.member == member; }));
}

int Seats::first_not_elastic() const {
  int first = -1;
  for (const auto& [number, seat] : seats_) {
    if (!seat.elastic && (first < 0 || seat.rank < first)) first = seat.rank;
  }
  return first;
}

std::vector<Seat> Seats::of(int member) const {
  std::vector<Seat> result;
  for (const auto& [number, seat] : seats_) {
    if (seat.member == member) result.push_back({.number = number, .rank = seat.rank, .fresh = seat.fresh});
  }
  std::sort(result.begin(), result.end(), [](const Seat& a, const Seat& b) { return a.rank < b.rank; });
  return result;
}

}  // namespace serried::launch
