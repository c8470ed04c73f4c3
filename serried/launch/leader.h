// The leader's side of a job: collects the launchers and carries the orders of the membership to them.
#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/launch/error.h"
#include "serried/launch/fd.h"
#include "serried/launch/handshake.h"
#include "serried/launch/keys.h"
#include "serried/launch/lookout.h"
#include "serried/launch/loop.h"
#include "serried/launch/membership.h"
#include "serried/launch/options.h"
#include "serried/launch/order.h"
#include "serried/launch/output.h"
#include "serried/launch/pulse.h"
#include "serried/launch/relay.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// Node 0's launcher, or one without ranks (`serried rendezvous`). A job on one node is the same thing without peers.
/// `Member` has the same methods.
class Leader {
 public:
  /// `listener` is bound to the rendezvous; a job on one node has none. With 0 ranks it is apart: no node of the job.
  Leader(const Options& options, Screen& screen, Fd listener);

  void watch(std::vector<Watch>& watches);
  Time deadline() const;

  /// Deals with what has come and with time that has passed. LaunchError if not enough nodes join in time.
  void tick();

  /// What this node itself is to do; a leader that is apart hears what the others are told.
  std::vector<Order> take_orders();

  /// A rank of node 0 asks the store (see Keys) under a number that is used once, or wants no answer any more.
  void ask(uint64_t number, const Message& question) { keys_.ask({self_, number}, question); }
  void forget(uint64_t number) { keys_.forget({self_, number}); }
  std::vector<Relay::Answer> take_answers();

  /// Rank 0 has inherited the master socket.
  void started() { master_.reset(); }

  void done() { membership_.done(self_); }
  void failed(const Cause& cause) { membership_.failed(self_, cause); }
  void ended() { membership_.ended(self_); }

  /// --keep-going: of one rank of this node.
  void rank_is_elastic(int seat) { membership_.rank_is_elastic(self_, seat); }
  void rank_done(int seat) { membership_.rank_done(self_, seat); }
  void rank_lost(int seat, const Cause& cause) { membership_.rank_lost(self_, seat, cause); }

  /// This node goes without being asked: the job ends.
  void leave() { failed({.kind = Cause::Kind::interrupted, .signal = SIGHUP}); }
  bool has_leader() const { return true; }
  /// Of a leader that is apart: the job ends, by a signal that came here.
  void interrupt(int signal);

  /// How far this host's clock is from node 0's: it is node 0's.
  std::optional<ClockEstimate> clock() const { return ClockEstimate(); }

  /// Where ranks of other nodes are.
  PlacesMail& places() { return places_; }
  bool is_leader() const { return true; }
  std::string leader_away() const { return ""; }
  size_t num_others() const { return peers_.size(); }
  void ask_for_places();
  void send_places(const std::string&) {}

  /// This process is about to be stopped, by Ctrl-Z.
  void pause();

 private:
  struct Peer {
    Connection connection;
    Pulse pulse;
    int member = -1;      // until it has said hello
    std::string id = {};  // of its launcher
    size_t num_received = 0;
    std::string host = {};            // its address; "" if it came by loopback
    std::optional<Hello> hello = {};  // until it has said where its rank 0 would listen
    int master_port = 0;              // there, if this leader is apart
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
  bool is_apart() const { return options_.num_ranks == 0; }
  std::string own_name() const { return is_apart() ? "the leader" : "node 0"; }
  void hear_hello(Peer& peer, const Hello& hello);
  void hear_place(Peer& peer, const Message& message);
  void welcome(Peer& peer, const Hello& hello);
  Membership::Joined take_in(const Hello& hello);
  void refuse_members();
  void refuse(Peer& peer, const std::string& host, const std::string& refusal, const std::string& fix,
              int code = kExitUsage);
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
  void place_rank_0(const std::vector<MemberOrder>& orders);
  void deliver_answers();

  Options options_;
  Screen& screen_;
  Address address_;
  Fd listener_;
  Fd master_;
  std::string master_host_ = {};  // where rank 0 is, if this leader is apart; "": at the rendezvous
  int master_port_ = 0;
  Membership membership_;
  int self_ = kLeader;  // this node among the members
  Keys keys_;           // of the generation that runs
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
