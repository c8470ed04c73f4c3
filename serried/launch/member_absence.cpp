// A node whose ranks live on without the leader that they had: it seeks another one at the same address.
#include <algorithm>
#include <string>
#include <utility>

#include "serried/launch/member.h"

namespace serried::launch {
namespace {

constexpr Seconds kAfterRefusal{5};  // who started that leader has to start it anew
constexpr Seconds kFirstNotice{5};
constexpr int kByNameEvery = 4;

constexpr const char* kSameLeader =
    "start the launcher that led the job there again, with the same command line, or raise --rejoin-timeout";

}  // namespace

// Who leads by ssh is started by nobody again. A leader that ends on purpose has told so.
bool Member::may_outlive_leader() const {
  return working_ && !ending_ && standing_.outlives_leader() && options_.rejoin_timeout.count() > 0 &&
         options_.control == nullptr;
}

void Member::begin_absence(const std::string& why) {
  const Time now = Clock::now();
  absence_ = {.since = now, .until = after(options_.rejoin_timeout), .notice_at = after(kFirstNotice)};
  num_attempts_ = 0;
  try_at_ = after(kFirstPause);
  answer_by_ = kNever;
  last_error_ = "no answer";
  const bool broken = standing_.is_broken_without_leader();
  const Cause cause{.kind = Cause::Kind::node_lost,
                    .node = leader_is_apart_ ? kNodeOfLeader : 0,
                    .host = address_.host,
                    .text = why,
                    .goes_on = true,
                    .note = std::string("the ranks here ") + (broken ? "wait" : "go on") + ", for up to " +
                            to_text(options_.rejoin_timeout) + ", until a leader is at " + options_.rendezvous};
  if (broken) return say_over(cause, cause.note);
  screen_.write(Stream::err, describe(cause, 1, options_.max_nodes));
}

// To the ranks here, which else would wait for a word of the leader: the table that they are in is broken.
void Member::say_over(Cause cause, const std::string& note) {
  cause.goes_on = true;
  cause.note = note;
  if (cause.host.empty()) cause.host = host_name();
  if (cause.kind == Cause::Kind::rank_failed) cause.node = standing_.node_rank();
  orders_.push_back({.kind = Order::Kind::over, .assignment = {.attempt = standing_.generation()}, .cause = cause});
}

// By name now and then only, since a lookup may block, and what ranks print with it.
Address Member::next_address() const {
  if (!absence_ || reached_.empty() || num_attempts_ % kByNameEvery == kByNameEvery - 1) return address_;
  return {reached_, address_.port};
}

void Member::seek_leader() {
  const Time now = Clock::now();
  if (now >= absence_->until) {
    const std::string last = absence_->refusal.empty() ? last_error_ : absence_->refusal;
    return give_up_leader("no leader was at " + where() + " again within " + to_text(options_.rejoin_timeout) +
                              ": tried " + std::to_string(num_attempts_) + (num_attempts_ == 1 ? " time" : " times") +
                              ", at last: " + last,
                          kSameLeader);
  }
  if (now >= absence_->notice_at) tell_how_long();
  const bool closed = connection_ && connection_->closed();
  if (closed) try_at_ = std::max(try_at_, after(kFirstPause));
  const bool stuck = (connecting_ || greeting_) && now >= try_at_;
  if (closed || stuck || (!connecting_ && !greeting_ && !connection_)) connect_again();
}

// After 5, 10, 20 s and so on.
void Member::tell_how_long() {
  const auto so_far = absence_->notice_at - absence_->since;
  const std::string why = absence_->refusal.empty() ? last_error_ : absence_->refusal;
  screen_.write(Stream::err, "[run] waiting for a leader at " + where() + " since " +
                                 std::to_string(std::chrono::duration_cast<std::chrono::seconds>(so_far).count()) +
                                 " s (" + why + "); after " + to_text(options_.rejoin_timeout) +
                                 " the ranks here are ended\n");
  absence_->notice_at += so_far;
}

// What the leader before may not have known comes after what it knew.
void Member::end_absence() {
  absence_.reset();
  screen_.write(Stream::err, "[run] a leader is at " + options_.rendezvous + " again\n");
  for (const Message& message : standing_.ends()) connection_->send(message);
  relay_.ask_again();
  send_questions();
}

void Member::hear_refusal(const Message& message) {
  const int code = number_in(message[1]);
  if (!working_) throw LaunchError(code, message[2], message[3]);
  if (code != kExitUsage) return give_up_leader(message[2], message[3]);
  // Whoever started that leader may have made a mistake, which must not cost a training.
  connection_->close();
  if (!absence_) return;
  if (absence_->refusal != message[2]) {
    screen_.write(Stream::err, "[run] " + message[2] + "\n  fix: " + message[3] + "\n");
  }
  absence_->refusal = message[2];
  try_at_ = after(kAfterRefusal);
}

void Member::give_up_leader(const std::string& what, const std::string& fix) {
  if (connection_) connection_->close();
  connecting_.reset();
  greeting_.reset();
  if (standing_.outlives_leader() && standing_.is_done()) {
    screen_.write(Stream::err, "[run] " + what + "; all ranks here have ended with 0\n");
    absence_.reset();
    leader_is_done_ = true;
    orders_.push_back({.kind = Order::Kind::exit, .exit_code = 0});
    return;
  }
  end_alone({.kind = Cause::Kind::launch_failed,
             .exit_code = kExitFailure,
             .text = "[run] " + what + "; the ranks here are ended\n  fix: " + fix});
}

// Nobody is told, and nobody else gives the code.
void Member::end_alone(const Cause& cause) {
  absence_.reset();
  lost_ = true;
  answer_by_ = kNever;
  exit_code_alone_ = exit_code(cause);
  Cause ours = cause;
  ours.node = standing_.outlives_leader() ? standing_.node_rank() : options_.node_rank;
  ours.host = host_name();
  orders_.push_back({.kind = Order::Kind::stop, .cause = std::move(ours)});
}

}  // namespace serried::launch
