// Node 0's side of a job: collects the other launchers and carries the coordinator's orders to them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/launch/coordinator.h"
#include "serried/launch/fd.h"
#include "serried/launch/handshake.h"
#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/output.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// A job on one node is the same thing without peers. `Member` has the same methods.
class Leader {
 public:
  /// LaunchError if the port is in use.
  Leader(const Options& options, Screen& screen);

  void watch(std::vector<Watch>& watches);
  Time deadline() const;

  /// Deals with what has come and with time that has passed. LaunchError if not all nodes join in time.
  void tick();

  /// What node 0 itself is to do.
  std::vector<Order> take_orders();

  /// Rank 0 has inherited the master socket.
  void started() { master_.reset(); }

  void done() { coordinator_.done(0); }
  void failed(const Cause& cause) { coordinator_.failed(0, cause); }
  void ended() { coordinator_.ended(0); }

 private:
  struct Peer {
    Connection connection;
    int node = -1;  // until it has said hello
  };

  // A connection that has not shown that it has the token.
  struct Stranger {
    Fd socket;
    Handshake handshake;
    Time deadline;
  };

  int new_master_port();
  void accept_strangers();
  void greet(Stranger& stranger);
  void refuse_stranger(Stranger& stranger, const std::string& why);
  void hear(Peer& peer);
  void answer(Peer& peer, const Message& message);
  void welcome(Peer& peer, const Hello& hello);
  void drop_closed();
  void give_up_on_silent_nodes();
  void check_joined();
  void deliver();

  Options options_;
  Screen& screen_;
  Address address_;
  Fd listener_;
  Fd master_;
  Coordinator coordinator_;
  std::vector<std::unique_ptr<Stranger>> strangers_;
  Time next_word_of_strangers_{};
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Order> own_orders_;
  Time join_deadline_;
  Time notice_at_;
  Time stop_deadline_ = kNever;
};

}  // namespace serried::launch
