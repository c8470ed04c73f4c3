// Orders and hellos on the wire.
#include "serried/launch/order.h"

#include <stdexcept>
#include <utility>

#include "serried/launch/version.h"

namespace serried::launch {
namespace {

void expect_fields(const Message& message, size_t count) {
  if (message.size() != count) throw std::runtime_error("message " + message[0] + " has a wrong number of fields");
}

Message start_message(const std::string& verb, const Assignment& a) {
  Message message = {verb};
  for (int number :
       {a.attempt, a.max_restarts, a.num_local, a.first_rank, a.world_size, a.node_rank, a.num_nodes, a.master_port}) {
    message.push_back(std::to_string(number));
  }
  message.push_back(a.run_id);
  message.push_back(a.job_secret);
  message.push_back(a.news);
  message.push_back(std::to_string(static_cast<int>(a.keep_going)));
  message.push_back(a.master_host);
  for (int number : {a.restarts, a.next_seat, a.num_with_leader}) message.push_back(std::to_string(number));
  for (const Seat& seat : a.seats) {
    for (const int number : {seat.number, seat.rank, static_cast<int>(seat.fresh)}) {
      message.push_back(std::to_string(number));
    }
  }
  return message;
}

Assignment assignment_from(const Message& message) {
  constexpr size_t kFixed = 17;
  if (message.size() < kFixed || (message.size() - kFixed) % 3 != 0) expect_fields(message, kFixed);
  const auto number = [&](size_t i) { return number_in(message[i]); };
  std::vector<Seat> seats;
  for (size_t i = kFixed; i < message.size(); i += 3) {
    seats.push_back({.number = number(i), .rank = number(i + 1), .fresh = number(i + 2) != 0});
  }
  return {.attempt = number(1),
          .max_restarts = number(2),
          .num_local = number(3),
          .first_rank = number(4),
          .world_size = number(5),
          .node_rank = number(6),
          .num_nodes = number(7),
          .master_host = message[13],
          .master_port = number(8),
          .run_id = message[9],
          .job_secret = message[10],
          .news = message[11],
          .keep_going = number(12) != 0,
          .seats = std::move(seats),
          .restarts = number(14),
          .next_seat = number(15),
          .num_with_leader = number(16)};
}

}  // namespace

Message to_message(const Order& order) {
  if (order.kind == Order::Kind::start) return start_message("start", order.assignment);
  if (order.kind == Order::Kind::table) return start_message("table", order.assignment);
  if (order.kind == Order::Kind::wait) return {"wait", order.assignment.news};
  if (order.kind == Order::Kind::exit) return {"exit", std::to_string(order.exit_code)};
  Message message = to_fields(order.cause);
  if (order.kind == Order::Kind::over) message.insert(message.begin(), std::to_string(order.assignment.attempt));
  message.insert(message.begin(), order.kind == Order::Kind::over ? "over" : "stop");
  return message;
}

Order order_from(const Message& message) {
  if (message[0] == "start") return {.kind = Order::Kind::start, .assignment = assignment_from(message)};
  if (message[0] == "table") return {.kind = Order::Kind::table, .assignment = assignment_from(message)};
  if (message[0] == "over" && message.size() > 1) {
    return {.kind = Order::Kind::over,
            .assignment = {.attempt = number_in(message[1])},
            .cause = cause_from_fields(message, 2)};
  }
  if (message[0] == "wait") {
    expect_fields(message, 2);
    return {.kind = Order::Kind::wait, .assignment = {.news = message[1]}};
  }
  if (message[0] == "stop") return {.kind = Order::Kind::stop, .cause = cause_from_fields(message, 1)};
  if (message[0] != "exit") throw std::runtime_error("unknown message " + message[0]);
  expect_fields(message, 2);
  return {.kind = Order::Kind::exit, .exit_code = number_in(message[1])};
}

Message to_message(const Hello& hello) {
  Message message = {"hello",
                     hello.version,
                     hello.host,
                     hello.machine,
                     hello.nonce,
                     std::to_string(hello.node_rank),
                     std::to_string(hello.min_nodes),
                     std::to_string(hello.max_nodes),
                     std::to_string(hello.num_local),
                     hello.command.text,
                     hello.command.digest};
  if (!hello.claim) return message;
  const std::vector<std::string> fields = to_fields(*hello.claim);
  message.insert(message.end(), fields.begin(), fields.end());
  return message;
}

Hello hello_from(const Message& message) {
  if (message.size() < 3) throw std::runtime_error("message hello is too short");
  if (message[1] != version_text()) return {.version = message[1], .host = message[2]};
  constexpr size_t kWithoutClaim = 11;
  if (message.size() < kWithoutClaim) expect_fields(message, kWithoutClaim);
  std::optional<Claim> claim;
  if (message.size() > kWithoutClaim) claim = claim_from_fields(message, kWithoutClaim);
  return {.version = message[1],
          .host = message[2],
          .machine = message[3],
          .nonce = message[4],
          .node_rank = number_in(message[5]),
          .min_nodes = number_in(message[6]),
          .max_nodes = number_in(message[7]),
          .num_local = number_in(message[8]),
          .command = {.text = message[9], .digest = message[10]},
          .claim = std::move(claim)};
}

}  // namespace serried::launch
