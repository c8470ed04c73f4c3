// The launchers' protocol: any bytes that a stranger sends to node 0, or node 0 to the others.
#include "tests/fuzz/target.h"

#include "serried/launch/control.h"
#include "serried/launch/keys.h"
#include "serried/launch/membership.h"
#include "serried/launch/order.h"
#include "serried/launch/relay.h"
#include "serried/launch/version.h"

namespace serried::fuzz {
namespace {

launch::Message decode_all(std::string bytes, std::vector<launch::Message>& messages) {
  for (launch::Message message; !(message = launch::decode(bytes)).empty();) messages.push_back(std::move(message));
  return {};
}

void check_cause(const launch::Cause& cause) {
  require(!launch::describe(cause, 4, 2).empty(), "a failure of no known kind");
  launch::exit_code(cause);
}

// Seeds cannot know the version, and without it no more than a name is read.
launch::Message of_this_version(launch::Message hello) {
  if (hello.size() > 1 && hello[1] == "ours") hello[1] = launch::version_text();
  return hello;
}

void read_as_node_0(const launch::Message& message, launch::Membership& membership) {
  if (message[0] == "failed") {
    const launch::Cause cause = launch::cause_from_fields(message, 1);
    check_cause(cause);
    membership.failed(0, cause);
  }
  if (message.size() > 1 && message[0] == "rank_lost") {
    membership.rank_lost(0, launch::number_in(message[1]), launch::cause_from_fields(message, 2));
  }
  if (message[0] != "hello") return;
  const launch::Hello hello = launch::hello_from(of_this_version(message));
  require(launch::to_message(launch::hello_from(launch::to_message(hello))) == launch::to_message(hello),
          "a hello that does not come back from its message");
  const launch::Joiner joiner{.host = hello.host,
                              .machine = hello.machine,
                              .node_rank = hello.node_rank,
                              .min_nodes = hello.min_nodes,
                              .max_nodes = hello.max_nodes,
                              .num_local = hello.num_local,
                              .command = hello.command};
  if (!hello.claim) {
    membership.join(joiner, launch::Time());
    return;
  }
  const bool takes_over = !membership.started();
  membership.rejoin(joiner, *hello.claim, launch::Time());
  if (takes_over) membership.tick(launch::Time() + std::chrono::seconds(20));
}

void read_as_other_node(const launch::Message& message) {
  const launch::Order order = launch::order_from(message);
  const bool has_cause = order.kind == launch::Order::Kind::stop || order.kind == launch::Order::Kind::over;
  if (has_cause) check_cause(order.cause);
  const launch::Message again = launch::to_message(order);
  require(launch::to_message(launch::order_from(again)) == again, "an order that does not come back from its message");
}

void read_as_node_of_hosts(const launch::Message& message) {
  const launch::Message again = launch::to_message(launch::node_setup_from(message));
  require(launch::to_message(launch::node_setup_from(again)) == again,
          "a setup that does not come back from its message");
}

// A question of a rank, and what a leader answers.
void read_as_store(const launch::Message& message, launch::Keys& keys, uint64_t number) {
  keys.ask({0, number}, message);
  keys.forget({0, number});
  require(keys.take_answers().size() <= 1, "a question with two answers");
  launch::Relay relay;
  relay.ask(number, message);
  relay.hear(message);
}

}  // namespace

void run_wire(std::string_view bytes) {
  std::vector<launch::Message> messages;
  succeeds<std::runtime_error>([&] { decode_all(std::string(bytes), messages); });
  launch::Membership membership(
      {.min_nodes = 3, .max_nodes = 3, .max_restarts = 1, .keep_going = true, .run_id = "fuzz", .new_master_port = [] {
         return 29500;
       }});
  membership.join({.host = "node0", .node_rank = 0, .min_nodes = 3, .max_nodes = 3, .num_local = 2}, launch::Time());
  launch::Keys keys({.most_bytes_of_a_value = 1000, .most_bytes = 10000});
  uint64_t number = 0;
  for (const launch::Message& message : messages) {
    std::string encoded = launch::encode(message);
    require(launch::decode(encoded) == message && encoded.empty(), "a message that does not come back from its bytes");
    // What makes no sense is a runtime_error; the connection is closed then.
    succeeds<std::runtime_error>([&] { read_as_node_0(message, membership); });
    succeeds<std::runtime_error>([&] { read_as_other_node(message); });
    succeeds<std::runtime_error>([&] { read_as_node_of_hosts(message); });
    succeeds<std::runtime_error>([&] { read_as_store(message, keys, ++number); });
  }
  require(keys.num_bytes() <= 10000 && keys.num_waiting() == 0, "a store that grows without a limit");
}

}  // namespace serried::fuzz
