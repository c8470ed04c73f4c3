// Connecting with retries, then one conversation with node 0.
#include "serried/launch/member.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "serried/launch/error.h"
#include "serried/launch/signals.h"
#include "serried/launch/token.h"
#include "serried/launch/version.h"

namespace serried::launch {
namespace {

constexpr Seconds kLongestPause{1};
constexpr Seconds kTryTimeout{5};    // of one connect: packets may just vanish
constexpr int kMostRefusals = 3;     // node 0 may also have closed the connection for another reason
constexpr Seconds kAnswerSlack{30};  // above what node 0 allows the slowest node

constexpr const char* kNotNode0 = "something answers there, but it is not node 0's launcher";

}  // namespace

Member::Member(const Options& options, Screen& screen)
    : options_(options),
      screen_(screen),
      address_(parse_address(options.rendezvous)),
      nonce_(make_token()),
      last_place_(address_.host),
      join_deadline_(after(options.join_timeout)),
      notice_at_(after(kNoticeAfter)),
      try_at_(Clock::now()) {}

void Member::watch(std::vector<Watch>& watches) {
  if (connecting_) watches.push_back({connecting_.get(), POLLOUT, [this] { finish_connecting(); }});
  if (greeting_) watches.push_back({greeting_->socket.get(), greeting_->handshake.events(), [this] { greet(); }});
  if (connection_) watches.push_back({connection_->fd(), connection_->events(), [this] { hear(); }});
}

void Member::connect_again() {
  connecting_.reset();
  greeting_.reset();
  connection_.reset();
  pulse_.reset();
  welcomed_ = false;
  if (Clock::now() < try_at_) return;
  // Name lookup may block for long; where no rank runs yet, Ctrl-C may simply end this process.
  std::optional<SignalsAct> act;
  if (!working_) act.emplace();
  Connecting attempt = start_connecting(next_address(), num_attempts_);
  ++num_attempts_;
  if (!attempt.error.empty()) last_error_ = attempt.error;
  last_place_ = attempt.place;
  const Seconds pause = std::min(kFirstPause * num_attempts_, kLongestPause);
  try_at_ = after(attempt.socket ? kTryTimeout : pause);
  connecting_ = std::move(attempt.socket);
}

void Member::finish_connecting() {
  if (const std::string error = connect_error(connecting_); !error.empty()) return try_later(error);
  keep_alive(connecting_);
  greeting_.emplace(Greeting{std::move(connecting_), Handshake(Handshake::Side::member, options_.token)});
  try_at_ = after(kTryTimeout);
  last_error_ = kNotNode0;
}

void Member::try_later(const std::string& error) {
  last_error_ = error;
  connecting_.reset();
  greeting_.reset();
  try_at_ = after(std::min(kFirstPause * num_attempts_, kLongestPause));
}

void Member::greet() {
  using State = Handshake::State;
  const State state = greeting_->handshake.advance(greeting_->socket);
  if (state == State::open) return;
  if (state == State::other_token) {
    const std::string what = "node 0 at " + options_.rendezvous + " has another token than this node" +
                             (options_.token.empty() ? ", which has none" : "");
    if (absence_ || ++num_refusals_ < kMostRefusals) return try_later(what);
    throw LaunchError(kExitUsage, what, "set the same SERRIED_TOKEN_FILE or SERRIED_TOKEN on every node");
  }
  if (state == State::other_protocol) {
    const std::string what = "the leader at " + options_.rendezvous + " runs another version of serried";
    if (absence_) return try_later(what);
    throw LaunchError(kExitUsage, what, "install the same one on every node: serried --version");
  }
  if (state != State::agreed) return try_later(kNotNode0);
  own_host_ = own_host(greeting_->socket);
  connection_.emplace(std::move(greeting_->socket), channel::kMostBytes);
  num_received_ = 0;
  greeting_.reset();
  pulse_.emplace(options_.lost_after, Clock::now());
  Hello hello{.version = version_text(),
              .host = host_name(),
              .machine = machine_id(),
              .nonce = nonce_,
              .node_rank = options_.node_rank,
              .min_nodes = options_.min_nodes,
              .max_nodes = options_.max_nodes,
              .num_local = options_.num_ranks,
              .command = mark_of_command(options_.command)};
  if (absence_) hello.claim = standing_.claim(leader_is_apart_);
  connection_->send(to_message(hello));
}

void Member::hear() {
  connection_->flush();
  try {
    const std::vector<Message> messages = connection_->receive();
    // Part of a long message is a sign of life too.
    if (connection_->num_received() != num_received_) pulse_->heard(Clock::now());
    num_received_ = connection_->num_received();
    for (const Message& message : messages) answer(message);
  } catch (const LaunchError&) {
    throw;
  } catch (const std::exception&) {
    connection_->close();
  }
}

void Member::answer(const Message& message) {
  if (message[0] == "pause") pulse_->pause();
  if (message[0] == "beat" || message[0] == "pause") return;
  if (message[0] == "clock" && message.size() == 3) {
    return clock_.add(nanoseconds_in(message[1]), nanoseconds_in(message[2]), monotonic_ns());
  }
  if (message[0] == "answer") return relay_.hear(message);
  if (message[0] == "look") {
    places_.asked = true;
    return;
  }
  if (message[0] == "lost" && message.size() == 2) {
    if (!working_) return connection_->close();
    ending_ = true;  // its ranks are no longer in the table
    return lose_node_0("this node was frozen or cut off: " + message[1]);
  }
  if (message[0] == "welcome") {
    welcomed_ = true;
    reached_ = last_place_;
    return absence_ ? end_absence() : void();
  }
  if (message[0] == "refuse" && message.size() == 4) return hear_refusal(message);
  if (message[0] == "listen") {
    leader_is_apart_ = leader_is_apart_ || !working_;  // another one in its place may be of another kind
    return open_master();
  }
  take_order(order_from(message));
}

void Member::take_order(Order order) {
  // What reaches the leader, as has just been proved, where rank 0 is there.
  if (order.assignment.master_host.empty()) order.assignment.master_host = address_.host;
  leader_is_done_ = leader_is_done_ || order.kind == Order::Kind::exit;
  if (order.kind == Order::Kind::stop) ending_ = true;
  if (order.kind == Order::Kind::start) ending_ = false;
  standing_.hear(order);
  const bool has_rank_0 = order.kind == Order::Kind::start && order.assignment.first_rank == 0;
  if (has_rank_0 && leader_is_apart_) order.assignment.listen_fd = master_.get();
  working_ = working_ || order.kind == Order::Kind::start || order.kind == Order::Kind::table;
  if (order.kind != Order::Kind::over && order.kind != Order::Kind::table) answer_by_ = kNever;
  orders_.push_back(std::move(order));
}

void Member::tick() {
  keep_pulse();
  const bool closed = connection_ && connection_->closed();
  if (working_) {
    if (leader_is_done_) return;
    if (absence_) return seek_leader();
    if (!lost_ && closed) lose_node_0("");
    if (!lost_ && Clock::now() >= answer_by_) lose_node_0("it gave no order");
    return;
  }
  if (!orders_.empty()) return;  // ended before it began
  check_join_deadline();
  if (closed) try_at_ = after(kFirstPause);
  const bool stuck = (connecting_ || greeting_) && Clock::now() >= try_at_;
  if (closed || stuck || (!connecting_ && !greeting_ && !connection_)) connect_again();
}

void Member::keep_pulse() {
  if (!connection_ || connection_->closed()) return;
  const Time now = Clock::now();
  pulse_->look(now);
  if (pulse_->is_lost(now)) {
    if (working_ && !absence_)
      return lose_node_0("it said nothing for " + to_text(options_.lost_after) + ", so it is frozen, off or cut off");
    last_error_ = "it fell silent";
    return connection_->close();
  }
  if (pulse_->takes_beat(now)) connection_->send({"beat", std::to_string(monotonic_ns())});
}

void Member::check_join_deadline() {
  if (welcomed_ && !connection_->closed()) return;
  if (Clock::now() >= notice_at_) {
    screen_.write(Stream::err, "[run] waiting for node 0 at " + where() + " (" + last_error_ + ")\n");
    notice_at_ = kNever;
  }
  if (Clock::now() < join_deadline_) return;
  throw LaunchError(kExitFailure,
                    host_name() + " cannot reach node 0's launcher at " + where() + " within " +
                        to_text(options_.join_timeout) + ": tried " + std::to_string(num_attempts_) +
                        (num_attempts_ == 1 ? " time" : " times") + ", at last: " + last_error_,
                    "start the same command, or serried rendezvous, on that host, or check --rendezvous, the firewall, "
                    "--join-timeout");
}

// The name, and what it means on this host.
std::string Member::where() const {
  return options_.rendezvous + (last_place_ == address_.host ? "" : " (" + last_place_ + ")");
}

// The connection itself goes in a later turn: watches may point at it.
void Member::lose_node_0(const std::string& why) {
  connection_->close();
  if (lost_ || leader_is_done_ || absence_) return;
  if (may_outlive_leader()) return begin_absence(why);
  lost_ = true;
  answer_by_ = kNever;
  const int node = leader_is_apart_ ? kNodeOfLeader : 0;
  orders_.push_back({.kind = Order::Kind::stop,
                     .cause = {.kind = Cause::Kind::node_lost, .node = node, .host = address_.host, .text = why}});
}

Time Member::deadline() const {
  if (leader_is_done_) return kNever;
  const bool connected = connection_ && !connection_->closed();
  const Time beat = connected ? pulse_->deadline() : kNever;
  if (absence_) return std::min({beat, absence_->until, absence_->notice_at, connected ? kNever : try_at_});
  if (working_) return std::min(answer_by_, beat);
  if (welcomed_) return beat;
  const Time next_try = connection_ ? kNever : try_at_;
  return std::min({beat, next_try, join_deadline_, notice_at_});
}

// At the address by which the leader sees this node, since that is what it tells the others.
void Member::open_master() {
  master_port_ = options_.master_port;
  if (master_port_ == 0) {
    master_ = listen_on({own_host_.empty() ? address_.host : own_host_, 0});
    master_port_ = port_of(master_);
  }
  connection_->send({"listens", std::to_string(master_port_), std::to_string(options_.max_restarts),
                     std::to_string(static_cast<int>(options_.keep_going))});
}

void Member::started() {
  if (leader_is_apart_ && connection_ && !connection_->closed()) open_master();
}

std::vector<Order> Member::take_orders() {
  return std::exchange(orders_, {});
}

void Member::done() {
  if (connection_) connection_->send({"done"});
}

void Member::failed(const Cause& cause) {
  if (!working_) {
    orders_.push_back({.kind = Order::Kind::exit, .exit_code = exit_code(cause)});
    return;
  }
  if (absence_) return end_alone(cause);
  ending_ = true;
  Message message = to_fields(cause);
  message.insert(message.begin(), "failed");
  if (connection_) connection_->send(message);
  answer_by_ = after(options_.grace + kAnswerSlack);
}

void Member::ask(uint64_t number, const Message& question) {
  relay_.ask(number, question);
  send_questions();
}

void Member::forget(uint64_t number) {
  relay_.forget(number);
  send_questions();
}

void Member::send_questions() {
  for (const Message& message : relay_.take_messages()) {
    if (is_in()) connection_->send(message);
  }
}

void Member::ended() {
  relay_.clear();
  if (lost_) {
    orders_.push_back({.kind = Order::Kind::exit, .exit_code = exit_code_alone_});
    return;
  }
  if (connection_) connection_->send({"ended"});
  answer_by_ = after(options_.grace + kAnswerSlack);
}

void Member::rank_is_elastic(int seat) {
  standing_.rank_is_elastic(seat);
  if (is_in()) connection_->send({"elastic", std::to_string(seat)});
}

void Member::rank_done(int seat) {
  standing_.rank_done(seat);
  if (is_in()) connection_->send(done_message(seat));
}

void Member::rank_lost(int seat, const Cause& cause) {
  standing_.rank_lost(seat, cause);
  if (is_in()) return connection_->send(lost_message(seat, cause));
  if (absence_) say_over(cause, "the other ranks here wait for a leader at " + options_.rendezvous);
}

void Member::leave() {
  if (!working_) {
    orders_.push_back({.kind = Order::Kind::exit, .exit_code = kExitFailure});
  } else if (!lost_) {
    lost_ = true;
    answer_by_ = kNever;
    connection_->close();
    orders_.push_back(
        {.kind = Order::Kind::stop,
         .cause = {
             .kind = Cause::Kind::interrupted, .node = options_.node_rank, .host = host_name(), .signal = SIGHUP}});
  }
}

void Member::send_places(const std::string& text) {
  if (is_in() && !text.empty()) connection_->send({"places", text});
}

void Member::pause() {
  if (is_in()) connection_->send({"pause"});
}

}  // namespace serried::launch
