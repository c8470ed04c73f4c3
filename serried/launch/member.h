// The side of a job of every node but the leader's: joins, obeys, tells what happened here.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "serried/launch/error.h"
#include "serried/launch/fd.h"
#include "serried/launch/handshake.h"
#include "serried/launch/lookout.h"
#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/order.h"
#include "serried/launch/output.h"
#include "serried/launch/pulse.h"
#include "serried/launch/relay.h"
#include "serried/launch/socket.h"
#include "serried/launch/standing.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// Has the same methods as `Leader`.
class Member {
 public:
  Member(const Options& options, Screen& screen);

  void watch(std::vector<Watch>& watches);
  Time deadline() const;

  /// LaunchError if the leader cannot be reached in time or refuses this node.
  void tick();
  std::vector<Order> take_orders();

  /// Rank 0, if it is here, has inherited the master socket: the next one gets another.
  void started();

  /// As the leader's, which is asked.
  void ask(uint64_t number, const Message& question);
  void forget(uint64_t number);
  std::vector<Relay::Answer> take_answers() { return relay_.take_answers(); }

  void done();
  void failed(const Cause& cause);
  void ended();
  void rank_is_elastic(int seat);
  void rank_done(int seat);
  void rank_lost(int seat, const Cause& cause);

  /// This node goes without being asked; node 0 sees that it is lost.
  void leave();
  /// Whether node 0 is there, and tells what happens.
  bool has_leader() const { return !lost_; }

  /// How far this host's clock is from node 0's, as far as it is known.
  std::optional<ClockEstimate> clock() const { return clock_.at(monotonic_ns()); }

  /// Where the ranks of this node are, for node 0.
  PlacesMail& places() { return places_; }
  bool is_leader() const { return false; }
  /// The leader's address while ranks live on without it; else "".
  std::string leader_away() const { return absence_ ? options_.rendezvous : ""; }
  size_t num_others() const { return 0; }
  void ask_for_places() {}
  void send_places(const std::string& text);

  void pause();

 private:
  static constexpr Seconds kFirstPause{0.05};  // between attempts to connect

  struct Absence {
    Time since;
    Time until;
    Time notice_at;
    std::string refusal = {};  // the last that was said
  };

  // A connection to what may be node 0.
  struct Greeting {
    Fd socket;
    Handshake handshake;
  };

  void finish_connecting();
  void greet();
  void try_later(const std::string& error);
  void connect_again();
  void hear();
  void answer(const Message& message);
  void check_join_deadline();
  void lose_node_0(const std::string& why);
  void keep_pulse();
  void send_questions();
  void open_master();

  // Without a leader, under --keep-going.
  bool may_outlive_leader() const;
  void begin_absence(const std::string& why);
  void say_over(Cause cause, const std::string& note);
  void seek_leader();
  void tell_how_long();
  void end_absence();
  void give_up_leader(const std::string& what, const std::string& fix);
  void hear_refusal(const Message& message);
  void end_alone(const Cause& cause);
  bool is_in() const { return connection_ && !absence_; }
  Address next_address() const;

  void take_order(Order order);
  std::string where() const;

  Options options_;
  Screen& screen_;
  Address address_;
  Fd connecting_;
  std::optional<Greeting> greeting_;
  std::optional<Connection> connection_;
  std::optional<Pulse> pulse_;  // as long as there is a connection
  std::string own_host_;        // of it; "" for loopback
  size_t num_received_ = 0;     // of it
  std::vector<Order> orders_;
  Relay relay_;
  PlacesMail places_;
  ClockOffset clock_;
  std::string nonce_;
  std::string last_error_ = "no answer";
  std::string last_place_;
  int num_attempts_ = 0;
  int num_refusals_ = 0;  // of the token
  bool welcomed_ = false;
  bool working_ = false;  // has been told to start once
  bool lost_ = false;
  bool leader_is_apart_ = false;  // node 0 is another: if it has rank 0, this node opens the port for it
  bool leader_is_done_ = false;   // it has given its last order, and may go
  bool ending_ = false;           // it has ordered the end of the ranks
  Standing standing_;
  std::optional<Absence> absence_;
  std::string reached_;                 // where the leader was, as a number
  int exit_code_alone_ = kExitFailure;  // if there is nobody to give one
  Fd master_;
  int master_port_ = 0;
  Time join_deadline_;
  Time notice_at_;
  Time try_at_;              // connecting: the next try
  Time answer_by_ = kNever;  // node 0 owes an order until then
};

}  // namespace serried::launch
