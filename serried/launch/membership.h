// Who is in a job, and what its launchers are told: one table of nodes after another. Pure: no sockets, no clock.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "serried/launch/cause.h"
#include "serried/launch/claim.h"
#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/order.h"
#include "serried/launch/program.h"
#include "serried/launch/seats.h"
#include "serried/launch/sit_out.h"

namespace serried::launch {

struct MembershipOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  Seconds last_call{3};          // from the moment that there are enough nodes; for those that come a little later
  bool keep_going = false;       // ranks that use Elastic live on when others are lost
  Seconds join_timeout{300};     // then: how long they wait while there are fewer than min_nodes
  Seconds sit_out{0};            // of a node whose ranks fail again and again; see SitOut
  bool leader_is_apart = false;  // it has no ranks, and is told what all members are, as kLeader
  std::string run_id = {};
  std::string job_secret = {};
  CommandMark command = {};              // of the job; empty: that of the first who joins
  std::function<int()> new_master_port;  // called once per generation
  Seconds claims_within{16};             // after the first one; see rejoin
};

/// A node that wants in.
struct Joiner {
  std::string host;
  std::string machine = {};  // who comes again from there gets the place that is free since
  int node_rank = -1;        // -1: any
  int min_nodes = 1;
  int max_nodes = 1;
  int num_local = 1;
  CommandMark command = {};
};

/// Who leads without being a member.
inline constexpr int kLeader = kNodeOfLeader;

struct MemberOrder {
  int member;
  Order order;
};

/// The leader's view of all nodes. Its own is one of them, joins first and has rank 0, unless it is apart. Members are
/// numbered as they join. A generation is one table of ranks: the members that start together. Numbers of both are used
/// once. Each call may add orders, which `take_orders` hands out.
///     gathering → running → stopping → running again, or the end
///     gathering → taking over → running, where nodes come whose ranks have lost their leader
/// With `keep_going` a rank or node that is lost makes a generation of those that are left, in their old order, and of
/// a rank in its place while restarts are left; they are told that the old one is over. Nodes that join make one
/// without that. A node that sits out (see SitOut) has no ranks, or gets none in the place of one that was lost, while
/// at least min_nodes others have some; the leader's own never does. All stop only if a rank that lives does not use
/// Elastic, or none is left.
class Membership {
 public:
  explicit Membership(MembershipOptions options);

  struct Joined {
    int member = -1;
    std::string refusal = {};  // why there is no member
    bool is_of_another_job = false;
    bool is_final = false;  // it makes no sense to come again
  };
  Joined join(const Joiner& joiner, Time now);

  /// --keep-going: a node whose ranks live on without the leader that they had. The first one makes this the leader of
  /// their job, which begins where they are: when all that are in their table have come, or `claims_within` later
  /// without the others, which are lost then, all get the next table. Older generations than the newest that comes are
  /// refused then. Nobody is told that the table before is over if nobody is lost: ranks meet between two steps.
  Joined rejoin(const Joiner& joiner, const Claim& claim, Time now);
  bool taking_over() const { return take_over_by_ != kNever; }
  int generation() const { return generation_; }

  /// Nodes that have come and cannot stay after all. They are no members any more.
  struct Refused {
    int member;
    std::string host;
    std::string why;
  };
  std::vector<Refused> take_refused() { return std::exchange(refused_, {}); }

  /// All of the member's ranks have exited with 0.
  void done(int member);
  /// The member's ranks cannot go on; the first cause of a generation counts.
  void failed(int member, Cause cause);
  /// --keep-going, of one rank of the member: it has said that it uses Elastic, has ended with 0, or otherwise.
  void rank_is_elastic(int member, int seat);
  void rank_done(int member, int seat);
  void rank_lost(int member, int seat, Cause cause);
  /// The member was ordered to stop and has no rank left.
  void ended(int member);
  /// The member's launcher is gone; `why` says how that was noticed, where it did not simply end.
  void lost(int member, const std::string& why = {});
  /// A leader that is apart ends the job.
  void end(Cause cause) { stop(std::move(cause)); }
  /// Call it at `deadline`.
  void tick(Time now);
  Time deadline() const {
    return std::min({cause_ || taking_over() ? kNever : change_at_, enough_by_, back_at_, take_over_by_});
  }

  std::vector<MemberOrder> take_orders();

  /// Places that nobody has, before the first generation.
  std::vector<int> missing() const;
  bool started() const { return generation_ >= 0; }
  bool stopping() const { return cause_.has_value(); }
  /// Members that were told to stop and have not said `ended`.
  std::vector<int> still_ending() const;

 private:
  enum class State { waiting, running, done, stopping, ended };
  struct Member {
    State state = State::waiting;
    int place = 0;  // ranks are numbered in the order of places
    int node_rank = 0;
    int num_local = 0;
    std::string host;
    std::string machine;
    int num_owed = 0;  // --keep-going: ranks to start when it sits out no more
  };

  std::string why_unfit(const Joiner& joiner) const;
  std::string why_no_room(const Joiner& joiner) const;
  Joined refused_command(const Joiner& joiner);
  int free_place(const Joiner& joiner) const;
  bool has(int place) const;
  bool any(State state) const;
  int num_members() const { return static_cast<int>(members_.size()); }
  void plan_change(Time now);
  void start(const std::string& news);
  void stop(Cause cause);
  void conclude_if_all_ended();
  void conclude(int exit_code);
  void tell_leader(Order order);
  bool sits_out(int number, Time now) const;
  std::map<int, int> who_takes_part() const;
  void note_failure(int number);
  std::string leave_out(const std::map<int, int>& by_place);
  Assignment assignment_of(const std::map<int, int>& by_place, const std::string& news);
  bool keeps_going() const { return options_.keep_going && started() && !cause_ && !concluded_; }
  void go_on_without(Cause cause, int member_with_room);
  void grow();
  int num_nodes_with_ranks() const;
  std::string give_back(bool also_who_sits_out);
  void publish(const std::string& news);
  void give_up_on_nodes(Time now);
  void tell_over(const Cause& cause);

  // Taking over.
  struct End {
    int member;
    int seat;
    enum class Kind { elastic, done, lost } kind;
    Cause cause = {};
  };
  std::string why_no_claim(const Claim& claim) const;
  std::string why_too_late(const Claim& claim) const;
  void learn(const Claim& claim, Time now);
  int num_claimed() const;
  bool all_have_come() const;
  bool has_told_all(const Claim& claim) const;
  void finish_take_over(Time now);
  void refuse_old_claims();
  void refuse_who_is_too_many();
  void restore_seats();
  std::optional<Cause> who_did_not_come() const;
  void tell_what_happened_meanwhile();
  void renew();

  MembershipOptions options_;
  std::map<int, Member> members_;
  std::map<int, std::string> old_places_;  // machines of members that were lost
  std::vector<MemberOrder> orders_;
  std::optional<Cause> cause_;
  Time change_at_ = kNever;  // the last call is over
  SitOut sit_out_;
  Time now_{};             // of the last tick
  Time back_at_ = kNever;  // the next that sits out comes back
  int next_member_ = 0;
  int generation_ = -1;
  int restarts_ = 0;
  bool concluded_ = false;

  // --keep-going
  Seats seats_;
  bool any_rank_done_ = false;
  bool wants_to_grow_ = false;  // as soon as all ranks have said that they use Elastic
  bool short_of_nodes_ = false;
  Time enough_by_ = kNever;
  int master_port_ = 0;

  // Taking over.
  Time take_over_by_ = kNever;
  std::map<int, Claim> claims_;  // by member
  std::vector<End> meanwhile_;   // told before all have come
  std::vector<Refused> refused_;
  bool must_renew_ = false;  // the table: what was said in it is gone with the leader before
};

}  // namespace serried::launch
