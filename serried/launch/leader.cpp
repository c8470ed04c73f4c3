// The leader's sockets. Peers are only dropped between turns, because watches point at them.
#include "serried/launch/leader.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "serried/launch/error.h"
#include "serried/launch/socket.h"
#include "serried/launch/token.h"
#include "serried/launch/version.h"

namespace serried::launch {
namespace {

constexpr Seconds kHandshake{5};
constexpr size_t kMostStrangers = 64;
constexpr Seconds kBetweenWordsOfStrangers{60};
constexpr Seconds kSlack{10};   // for a node's last messages, on top of the grace its ranks get
constexpr Seconds kSeeking{6};  // nodes that have lost their leader try again after less

constexpr const char* kOtherJobFix =
    "end the launchers of the job that is over, and give each job a port of its own; what differs between the nodes of "
    "one job can be in a script, which all of them run";
constexpr const char* kSameVersion = "install the same version on every node: serried --version";
constexpr const char* kSameLeader = "start the leader again with the command line of the one that was lost";
constexpr const char* kComeAnew = "start the launcher of that node again: its ranks join as any that come later";
constexpr const char* kOwnRanks =
    "give each node its own --node-rank, or none of them one, and all the same --nnodes; a node too many is not needed";

std::string make_run_id() {
  std::random_device random;
  char text[32];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

std::string join_numbers(const std::vector<int>& numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

}  // namespace

Leader::Leader(const Options& options, Screen& screen, Fd listener)
    : options_(options),
      screen_(screen),
      address_(options.max_nodes > 1 ? parse_address(options.rendezvous) : Address{"127.0.0.1", 0}),
      listener_(std::move(listener)),
      membership_({.min_nodes = options.min_nodes,
                   .max_nodes = options.max_nodes,
                   .max_restarts = options.max_restarts,
                   .last_call = options.last_call,
                   .keep_going = options.keep_going,
                   .join_timeout = options.join_timeout,
                   .sit_out = options.sit_out,
                   .leader_is_apart = options.num_ranks == 0,
                   .run_id = make_run_id(),
                   .job_secret = make_token(),
                   .command = options.num_ranks == 0 ? CommandMark{} : mark_of_command(options.command),
                   .new_master_port = [this] { return new_master_port(); },
                   .claims_within = options.lost_after + kSeeking}),
      join_deadline_(after(options.join_timeout)),
      notice_at_(after(kNoticeAfter)) {
  if (is_apart()) return;
  self_ = membership_
              .join({.host = host_name(),
                     .machine = machine_id(),
                     .node_rank = 0,
                     .min_nodes = options.min_nodes,
                     .max_nodes = options.max_nodes,
                     .num_local = options.num_ranks,
                     .command = mark_of_command(options.command)},
                    Clock::now())
              .member;
}

int Leader::new_master_port() {
  if (is_apart()) return 0;  // rank 0's launcher opens it
  if (options_.master_port != 0) return options_.master_port;
  master_ = listen_on({address_.host, 0});
  return port_of(master_);
}

void Leader::watch(std::vector<Watch>& watches) {
  if (listener_) watches.push_back({listener_.get(), POLLIN, [this] { accept_strangers(); }});
  for (const auto& stranger : strangers_) {
    watches.push_back(
        {stranger->socket.get(), stranger->handshake.events(), [this, s = stranger.get()] { greet(*s); }});
  }
  for (const auto& peer : peers_) {
    watches.push_back({peer->connection.fd(), peer->connection.events(), [this, p = peer.get()] { hear(*p); }});
  }
}

void Leader::accept_strangers() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    if (strangers_.size() >= kMostStrangers) continue;  // a launcher tries again
    keep_alive(socket);
    strangers_.push_back(std::make_unique<Stranger>(
        Stranger{std::move(socket), Handshake(Handshake::Side::leader, options_.token), after(kHandshake)}));
    greet(*strangers_.back());
  }
}

void Leader::greet(Stranger& stranger) {
  using State = Handshake::State;
  const State state = stranger.handshake.advance(stranger.socket);
  if (state == State::open) return;
  if (state == State::agreed) {
    const std::string host = peer_host(stranger.socket);
    peers_.push_back(
        std::make_unique<Peer>(Peer{.connection = Connection(std::move(stranger.socket), channel::kMostBytes),
                                    .pulse = Pulse(options_.lost_after, Clock::now()),
                                    .host = host}));
    return;
  }
  if (state == State::closed_early) return stranger.socket.reset();
  refuse_stranger(stranger, state == State::other_token      ? "it has another token, or none"
                            : state == State::other_protocol ? "it is a launcher of another version of serried"
                                                             : "it is no launcher");
}

// Closed without a word to it, and with few words here.
void Leader::refuse_stranger(Stranger& stranger, const std::string& why) {
  if (Clock::now() >= next_word_of_strangers_) {
    screen_.write(Stream::err, "[run] refused a connection from " + peer_address(stranger.socket) + ": " + why + "\n");
    next_word_of_strangers_ = after(kBetweenWordsOfStrangers);
  }
  stranger.socket.reset();
}

void Leader::hear(Peer& peer) {
  peer.connection.flush();
  try {
    const std::vector<Message> messages = peer.connection.receive();
    // Part of a long message is a sign of life too.
    if (peer.connection.num_received() != peer.num_received) peer.pulse.heard(Clock::now());
    peer.num_received = peer.connection.num_received();
    for (const Message& message : messages) answer(peer, message);
  } catch (const LaunchError&) {
    throw;  // of this node: what the peer said made the job start, and there was no port
  } catch (const std::exception&) {
    peer.connection.close();  // it speaks something else
  }
}

void Leader::answer(Peer& peer, const Message& message) {
  if (message[0] == "hello") return hear_hello(peer, hello_from(message));
  if (message[0] == "pause") peer.pulse.pause();
  if (message[0] == "beat" && message.size() == 2) {
    peer.connection.send({"clock", message[1], std::to_string(monotonic_ns())});
  }
  if (message[0] == "beat" || message[0] == "pause") return;
  if (message[0] == "listens") return hear_place(peer, message);
  if (peer.member < 0) return peer.connection.close();
  if (message[0] == "places" && message.size() == 2) places_.received.emplace_back(peer.member, message[1]);
  if (message[0] == "done") membership_.done(peer.member);
  if (message[0] == "failed") membership_.failed(peer.member, cause_from_fields(message, 1));
  if (message[0] == "ended") membership_.ended(peer.member);
  if (message.size() >= 2 && message[0] == "elastic") membership_.rank_is_elastic(peer.member, number_in(message[1]));
  if (message.size() >= 2 && message[0] == "rank_done") membership_.rank_done(peer.member, number_in(message[1]));
  if (message.size() >= 2 && message[0] == "rank_lost") {
    membership_.rank_lost(peer.member, number_in(message[1]), cause_from_fields(message, 2));
  }
  if (message[0] == "ask") {
    keys_.ask({peer.member, question_number(message)}, Message(message.begin() + 2, message.end()));
  }
  if (message[0] == "forget") keys_.forget({peer.member, question_number(message)});
}

std::string Leader::why_refused(const Hello& hello) const {
  if (hello.version == version_text()) return "";
  return hello.host + " has " + hello.version + ", and " + own_name() + ", " + host_name() + ", " + version_text();
}

// A launcher that lost its connection before this end did.
void Leader::drop_who_came_again(const Peer& peer) {
  if (membership_.started() && !membership_.taking_over()) return;
  for (const auto& other : peers_) {
    if (other.get() == &peer || other->id != peer.id || other->member < 0) continue;
    lose(*other, "");
    other->connection.close();
  }
}

// With a leader that is apart, a node says first where its rank 0 would listen: all may start as soon as it is in.
void Leader::hear_hello(Peer& peer, const Hello& hello) {
  if (peer.member >= 0 || peer.hello) return peer.connection.close();
  if (const std::string refusal = why_refused(hello); !refusal.empty())
    return refuse(peer, hello.host, refusal, kSameVersion);
  if (!is_apart()) return welcome(peer, hello);
  peer.hello = hello;
  peer.connection.send({"listen"});
}

// Also later, since each generation has a port of its own.
void Leader::hear_place(Peer& peer, const Message& message) {
  if (!is_apart() || message.size() != 4) return peer.connection.close();
  peer.master_port = number_in(message[1]);
  if (peer.member >= 0) return;
  if (!peer.hello) return peer.connection.close();
  const Hello hello = *std::exchange(peer.hello, {});
  const int max_restarts = number_in(message[2]);
  const bool keep_going = message[3] == "1";
  if (max_restarts > 0 && max_restarts != options_.max_restarts) {
    return refuse(peer, hello.host,
                  "this node was started with --max-restarts " + message[2] + ", the leader with --max-restarts " +
                      std::to_string(options_.max_restarts),
                  "pass it to serried rendezvous; nodes may leave it out");
  }
  if (keep_going && !options_.keep_going) {
    return refuse(peer, hello.host, "this node was started with --keep-going, the leader without",
                  "pass it to serried rendezvous; nodes may leave it out");
  }
  welcome(peer, hello);
}

void Leader::welcome(Peer& peer, const Hello& hello) {
  peer.id = hello.machine + "/" + hello.nonce;
  drop_who_came_again(peer);
  const Membership::Joined joined = take_in(hello);
  if (joined.is_final) return refuse(peer, hello.host, joined.refusal, kComeAnew, kExitFailure);
  if (!joined.refusal.empty()) {
    return refuse(peer, hello.host, joined.refusal,
                  joined.is_of_another_job ? kOtherJobFix
                  : hello.claim            ? kSameLeader
                                           : kOwnRanks);
  }
  peer.member = joined.member;
  peer.connection.send({"welcome"});
}

Membership::Joined Leader::take_in(const Hello& hello) {
  const Joiner joiner{.host = hello.host,
                      .machine = hello.machine,
                      .node_rank = hello.node_rank,
                      .min_nodes = hello.min_nodes,
                      .max_nodes = hello.max_nodes,
                      .num_local = hello.num_local,
                      .command = hello.command};
  if (!hello.claim) return membership_.join(joiner, Clock::now());
  const bool had_begun = membership_.started();
  Membership::Joined joined = membership_.rejoin(joiner, *hello.claim, Clock::now());
  if (had_begun || !joined.refusal.empty()) return joined;
  screen_.write(Stream::err, "[run] the job runs, in generation " + std::to_string(hello.claim->generation) +
                                 ", and has lost its leader: it is led from here on\n");
  if (!is_apart()) return joined;
  master_host_ = hello.claim->master_host;
  master_port_ = hello.claim->master_port;
  return joined;
}

void Leader::refuse(Peer& peer, const std::string& host, const std::string& refusal, const std::string& fix, int code) {
  screen_.write(Stream::err, "[run] refused a launcher on " + host + ": " + refusal + "\n");
  peer.connection.send(
      {"refuse", std::to_string(code), own_name() + " at " + options_.rendezvous + " refuses: " + refusal, fix});
  peer.connection.close();
}

// Nodes that the membership had taken in until it knew who else comes.
void Leader::refuse_members() {
  for (const Membership::Refused& refused : membership_.take_refused()) {
    for (const auto& peer : peers_) {
      if (peer->member != refused.member) continue;
      peer->member = -1;
      keys_.forget_node(refused.member);
      refuse(*peer, refused.host, refused.why, kComeAnew, kExitFailure);
    }
  }
}

void Leader::ask_for_places() {
  for (const auto& peer : peers_) {
    if (peer->member >= 0) peer->connection.send({"look"});
  }
}

void Leader::pause() {
  for (const auto& peer : peers_) peer->connection.send({"pause"});
}

void Leader::tick() {
  keep_pulses();
  drop_closed();
  membership_.tick(Clock::now());
  refuse_members();
  check_joined();
  give_up_on_silent_nodes();
  deliver();
}

void Leader::keep_pulses() {
  for (const auto& peer : peers_) {
    const Time now = Clock::now();
    peer->pulse.look(now);
    if (peer->pulse.is_lost(now)) {
      give_up(*peer);
    } else if (peer->pulse.takes_beat(now)) {
      peer->connection.send({"beat"});
    }
  }
}

void Leader::lose(Peer& peer, const std::string& why) {
  keys_.forget_node(peer.member);
  membership_.lost(std::exchange(peer.member, -1), why);
}

// It is told in case that it wakes up, or that the network heals.
void Leader::give_up(Peer& peer) {
  if (peer.member >= 0 && !peer.connection.closed()) {
    const std::string why = "it said nothing for " + to_text(options_.lost_after) + ", so it is frozen, off or cut off";
    peer.connection.send({"lost", options_.rendezvous + " heard nothing from it for " + to_text(options_.lost_after)});
    lose(peer, why);
  }
  peer.connection.close();
}

void Leader::drop_closed() {
  for (const auto& stranger : strangers_) {
    if (stranger->socket && Clock::now() >= stranger->deadline) refuse_stranger(*stranger, "it says nothing");
  }
  std::erase_if(strangers_, [](const auto& stranger) { return !stranger->socket; });
  for (const auto& peer : peers_) {
    if (peer->connection.closed() && peer->member >= 0) lose(*peer, "");
  }
  std::erase_if(peers_, [](const auto& peer) { return peer->connection.closed(); });
}

std::string Leader::who_is_missing() const {
  const std::vector<int> missing = membership_.missing();
  const std::string of = " of " + range_text(options_.min_nodes, options_.max_nodes) + " nodes";
  if (options_.node_rank >= 0 && options_.min_nodes == options_.max_nodes) {
    return "node-rank " + join_numbers(missing) + of;
  }
  return std::to_string(static_cast<int>(missing.size()) - (options_.max_nodes - options_.min_nodes)) + " more" + of;
}

void Leader::check_joined() {
  if (membership_.started() || membership_.stopping()) return;
  if (membership_.deadline() != kNever) return;  // enough are there, and the last call is on
  const std::string who = who_is_missing();
  const std::string leads =
      options_.node_rank < 0 && !is_apart() ? "; " + host_name() + " is node 0, since it could listen there" : "";
  if (Clock::now() >= notice_at_) {
    screen_.write(Stream::err, "[run] waiting at " + options_.rendezvous + " for " + who + leads + "\n");
    notice_at_ = kNever;
  }
  if (Clock::now() < join_deadline_) return;
  const std::string what =
      who + " did not join at " + options_.rendezvous + " within " + to_text(options_.join_timeout) + leads;
  const std::string fix =
      "start the missing launchers, see that they reach that address, or raise --join-timeout" +
      std::string(leads.empty()
                      ? ""
                      : "; if another host says the same, that name means each of them itself there: pass an address");
  for (const auto& peer : peers_) peer->connection.send({"refuse", std::to_string(kExitFailure), what, fix});
  throw LaunchError(kExitFailure, what, fix);
}

// Their launchers live, and do not say that their ranks have ended.
void Leader::give_up_on_silent_nodes() {
  if (!membership_.stopping()) {
    stop_deadline_ = kNever;
    return;
  }
  if (stop_deadline_ == kNever) stop_deadline_ = after(options_.grace + kSlack);
  if (Clock::now() < stop_deadline_) return;
  const std::vector<int> late = membership_.still_ending();
  for (const auto& peer : peers_) {
    if (std::find(late.begin(), late.end(), peer->member) == late.end()) continue;
    lose(*peer, "it did not end its ranks in time");
    peer->connection.close();
  }
  stop_deadline_ = after(kSlack);
}

std::vector<Relay::Answer> Leader::take_answers() {
  deliver_answers();
  return std::exchange(own_answers_, {});
}

void Leader::deliver_answers() {
  for (const auto& [who, answer] : keys_.take_answers()) {
    if (who.node == self_) own_answers_.emplace_back(who.number, answer);
    for (const auto& peer : peers_) {
      if (who.node == self_ || peer->member != who.node) continue;
      Message message = {"answer", std::to_string(who.number)};
      message.insert(message.end(), answer.begin(), answer.end());
      peer->connection.send(message);
    }
  }
}

void Leader::deliver() {
  std::vector<MemberOrder> orders = membership_.take_orders();
  if (is_apart()) place_rank_0(orders);
  for (auto& [member, order] : orders) {
    // No rank of the generation before is left.
    if (order.kind == Order::Kind::start && generation_ != order.assignment.attempt) {
      generation_ = order.assignment.attempt;
      keys_.clear();
    }
    if (order.kind == Order::Kind::over) keys_.end_generations_before(order.assignment.attempt + 1);
    // Where nodes join, those before go on in their old table for a while. If it was another leader's, what they said
    // in it is not here.
    if (order.kind == Order::Kind::table && generation_ < 0) keys_.end_generations_before(order.assignment.attempt);
    if (order.kind == Order::Kind::table) generation_ = order.assignment.attempt;
    order.assignment.master_host = master_host_;
    if (is_apart()) order.assignment.master_port = master_port_;
    if (member == self_) own_orders_.push_back(order);
    for (const auto& peer : peers_) {
      if (member != self_ && peer->member == member) peer->connection.send(to_message(order));
    }
  }
}

// Where programs that call c10d themselves meet. Ranks that live on keep the place they have.
void Leader::place_rank_0(const std::vector<MemberOrder>& orders) {
  for (const auto& [member, order] : orders) {
    if (order.kind != Order::Kind::start || member == kLeader || order.assignment.first_rank != 0) continue;
    for (const auto& peer : peers_) {
      if (peer->member != member) continue;
      master_host_ = peer->host;
      master_port_ = peer->master_port;
    }
  }
}

void Leader::interrupt(int signal) {
  membership_.end({.kind = Cause::Kind::interrupted, .node = kNodeOfLeader, .host = host_name(), .signal = signal});
}

Time Leader::deadline() const {
  const bool joining = !membership_.started() && !membership_.stopping() && membership_.deadline() == kNever;
  Time next = joining ? std::min(join_deadline_, notice_at_) : stop_deadline_;
  next = std::min(next, membership_.deadline());
  for (const auto& stranger : strangers_) next = std::min(next, stranger->deadline);
  for (const auto& peer : peers_) next = std::min(next, peer->pulse.deadline());
  return next;
}

std::vector<Order> Leader::take_orders() {
  for (Order& order : own_orders_) {
    const bool any_address = address_.host == "0.0.0.0" || address_.host == "::";
    order.assignment.master_host = any_address ? "127.0.0.1" : address_.host;
    order.assignment.listen_fd = master_.get();
  }
  return std::exchange(own_orders_, {});
}

}  // namespace serried::launch
