// The launchers' protocol: any bytes that a stranger sends to node 0, or node 0 to the others.
#include "tests/fuzz/target.h"

#include "serried/launch/coordinator.h"
#include "serried/launch/order.h"

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

void read_as_node_0(const launch::Message& message, launch::Coordinator& coordinator) {
  if (message[0] == "failed") {
    const launch::Cause cause = launch::cause_from_fields(message, 1);
    check_cause(cause);
    coordinator.failed(1, cause);
  }
  if (message[0] != "hello") return;
  const launch::Hello hello = launch::hello_from(message);
  require(launch::to_message(launch::hello_from(launch::to_message(hello))) == launch::to_message(hello),
          "a hello that does not come back from its message");
  coordinator.join(hello.node, hello.num_nodes, hello.num_local, hello.host);
}

void read_as_other_node(const launch::Message& message) {
  const launch::Order order = launch::order_from(message);
  if (order.kind == launch::Order::Kind::stop) check_cause(order.cause);
  const launch::Message again = launch::to_message(order);
  require(launch::to_message(launch::order_from(again)) == again, "an order that does not come back from its message");
}

}  // namespace

void run_wire(std::string_view bytes) {
  std::vector<launch::Message> messages;
  succeeds<std::runtime_error>([&] { decode_all(std::string(bytes), messages); });
  launch::Coordinator coordinator(
      {.num_nodes = 3, .max_restarts = 1, .run_id = "fuzz", .new_master_port = [] { return 29500; }});
  coordinator.join(0, 3, 2, "node0");
  for (const launch::Message& message : messages) {
    std::string encoded = launch::encode(message);
    require(launch::decode(encoded) == message && encoded.empty(), "a message that does not come back from its bytes");
    // What makes no sense is a runtime_error; the connection is closed then.
    succeeds<std::runtime_error>([&] { read_as_node_0(message, coordinator); });
    succeeds<std::runtime_error>([&] { read_as_other_node(message); });
  }
}

}  // namespace serried::fuzz
