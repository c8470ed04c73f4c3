// What launchers tell each other, as values and as messages.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "serried/launch/cause.h"
#include "serried/launch/claim.h"
#include "serried/launch/plan.h"
#include "serried/launch/program.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// What a node's launcher is told to do.
struct Order {
  enum class Kind { start, stop, exit, over, table, wait };

  Kind kind = Kind::exit;
  // start; table: the ranks that are there go on with it; over: the generation only; wait, without ranks: the news only
  Assignment assignment = {};
  Cause cause = {};   // stop: end your ranks, say `ended`; over: tell them that its ranks are not all there
  int exit_code = 0;  // exit
};

/// How a launcher introduces itself to the leader.
struct Hello {
  std::string version;  // if it is not ours, nothing after the host is read
  std::string host;
  std::string machine = {};  // what names it better than a host name: see machine_id
  std::string nonce = {};    // of this launcher among those of its machine
  int node_rank = -1;
  int min_nodes = 0;
  int max_nodes = 0;
  int num_local = 0;
  CommandMark command = {};         // that it will run
  std::optional<Claim> claim = {};  // of ranks that live, to a leader that was started after them
};

/// Values as messages and back; std::runtime_error if a message makes no sense.
Message to_message(const Order& order);
Order order_from(const Message& message);
Message to_message(const Hello& hello);
Hello hello_from(const Message& message);

}  // namespace serried::launch
