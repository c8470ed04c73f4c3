// Node 0's side of a job: collects the other launchers and carries the orders of the membership to them.
#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/launch/fd.h"
#include "serried/launch/handshake.h"
#include "serried/launch/keys.h"
#include "serried/launch/lookout.h"
#include "serried/launch/loop.h"
#include "serried/launch/membership.h"
#include "serried/launch/options.h"
#include "serried/launch/output.h"
#include "serried/launch/pulse.h"
#include "serried/launch/relay.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// A job on one node is the same thing without peers. `Member` has the same methods.
class Leader {
 public:
  /// `listener` is bound to the rendezvous; a job on one node has none.
  Leader(const Options& options, Screen& screen, Fd listener);

  void watch(std::vector<Watch>& watches);
  Time deadline() const;

  /// Deals with what has come and with time that has passed. LaunchError if not enough nodes join in time.
  void tick();

  /// What node 0 itself is to do.
  std::vector<Order> take_orders();

  /// A rank of node 0 asks the store (see Keys) under a number that is used once, or wants no answer any more.
  void ask(uint64_t number, const Message& question) { keys_.ask({kSelf, number}, question); }
  void forget(uint64_t number) { keys_.forget({kSelf, number}); }
  std::vector<Relay::Answer> take_answers();

  /// Rank 0 has inherited the master socket.
  void started() { master_.reset(); }

  void done() { membership_.done(kSelf); }
  void failed(const Cause& cause) { membership_.failed(kSelf, cause); }
  void ended() { membership_.ended(kSelf); }

  /// --keep-going: of one rank of this node.
  void rank_is_elastic(int seat) { membership_.rank_is_elastic(kSelf, seat); }
  void rank_done(int seat) { membership_.rank_done(kSelf, seat); }
  void rank_lost(int seat, const Cause& cause) { membership_.rank_lost(kSelf, seat, cause); }

  /// This node goes without being asked: the job ends.
  void leave() { failed({.kind = Cause::Kind::interrupted, .signal = SIGHUP}); }
  bool has_leader() const { return true; }

  /// How far this host's clock is from node 0's: it is node 0's.
  std::optional<ClockEstimate> clock() const { return ClockEstimate(); }

  /// Where ranks of other nodes are.
  PlacesMail& places() { return places_; }
  bool is_node_0() const { return true; }
  size_t num_others() const { return peers_.size(); }
  void ask_for_places();
  void send_places(const std::string&) {}

  /// This process is about to be stopped, by Ctrl-Z.
  void pause();

 private:
  static constexpr int kSelf = 0;  // the first member

  struct Peer {
    Connection connection;
    Pulse pulse;
    int member = -1;      // until it has said hello
    std::string id = {};  // of its launcher
    size_t num_received = 0;
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
  std::string why_refused(const Hello& hello) const;
  void drop_who_came_again(const Peer& peer);
  void drop_closed();
  void keep_pulses();
  void lose(Peer& peer, const std::string& why);
  void give_up(Peer& peer);
  void give_up_on_silent_nodes();
  void check_joined();
  std::string who_is_missing() const;
  void deliver();
  void deliver_answers();

  Options options_;
  Screen& screen_;
  Address address_;
  Fd listener_;
  Fd master_;
  Membership membership_;
  Keys keys_;  // of the generation that runs
  std::vector<Relay::Answer> own_answers_;
  std::vector<std::unique_ptr<Stranger>> strangers_;
  Time next_word_of_strangers_{};
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Order> own_orders_;
  PlacesMail places_;
  Time join_deadline_;
  Time notice_at_;
  Time stop_deadline_ = kNever;
  int generation_ = -1;  // of the keys
};

}  // namespace serried::launch
