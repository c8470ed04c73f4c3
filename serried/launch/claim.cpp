// Claims on the wire.
#include "serried/launch/claim.h"

#include <algorithm>
#include <stdexcept>

namespace serried::launch {
namespace {

constexpr size_t kFixed = 13;
constexpr size_t kOfASeat = 4;

void check(const Claim& claim) {
  const auto counts = [](int number) { return number >= 0 && number < 1 << 30; };
  bool fine = counts(claim.generation) && claim.world_size >= 1 && claim.num_nodes >= 1 && counts(claim.node_rank) &&
              counts(claim.num_with_leader) && claim.num_with_leader <= claim.world_size && counts(claim.restarts) &&
              counts(claim.next_seat) && !claim.run_id.empty();
  for (const ClaimedSeat& seat : claim.seats) {
    fine = fine && seat.number >= 0 && seat.number < claim.next_seat && seat.rank >= 0 && seat.rank < claim.world_size;
  }
  if (!fine) throw std::runtime_error("a claim that makes no sense");
}

}  // namespace

bool any_lives(const Claim& claim) {
  return std::any_of(claim.seats.begin(), claim.seats.end(), [](const ClaimedSeat& seat) { return seat.lives; });
}

std::vector<std::string> to_fields(const Claim& claim) {
  std::vector<std::string> fields = {claim.run_id, claim.job_secret, claim.master_host};
  for (const int number : {claim.generation, claim.world_size, claim.num_nodes, claim.node_rank, claim.num_with_leader,
                           static_cast<int>(claim.leader_was_apart), claim.restarts, claim.next_seat, claim.master_port,
                           static_cast<int>(claim.any_done)}) {
    fields.push_back(std::to_string(number));
  }
  for (const ClaimedSeat& seat : claim.seats) {
    for (const int number : {seat.number, seat.rank, static_cast<int>(seat.elastic), static_cast<int>(seat.lives)}) {
      fields.push_back(std::to_string(number));
    }
  }
  return fields;
}

Claim claim_from_fields(const Message& message, size_t first) {
  const size_t size = message.size() < first ? 0 : message.size() - first;
  if (size < kFixed || (size - kFixed) % kOfASeat != 0) throw std::runtime_error("a claim with missing fields");
  const auto number = [&](size_t i) { return number_in(message[first + i]); };
  Claim claim{.run_id = message[first],
              .job_secret = message[first + 1],
              .generation = number(3),
              .world_size = number(4),
              .num_nodes = number(5),
              .node_rank = number(6),
              .num_with_leader = number(7),
              .leader_was_apart = number(8) != 0,
              .restarts = number(9),
              .next_seat = number(10),
              .master_host = message[first + 2],
              .master_port = number(11),
              .any_done = number(12) != 0};
  for (size_t i = kFixed; i < size; i += kOfASeat) {
    claim.seats.push_back(
        {.number = number(i), .rank = number(i + 1), .elastic = number(i + 2) != 0, .lives = number(i + 3) != 0});
  }
  check(claim);
  return claim;
}

}  // namespace serried::launch
