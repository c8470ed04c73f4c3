// Node 0's sockets. Peers are only dropped between turns, because watches point at them.
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

namespace serried::launch {
namespace {

constexpr Seconds kHandshake{5};
constexpr size_t kMostStrangers = 64;
constexpr Seconds kBetweenWordsOfStrangers{60};
constexpr Seconds kSlack{10};  // for a node's last messages, on top of the grace its ranks get

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

Leader::Leader(const Options& options, Screen& screen)
    : options_(options),
      screen_(screen),
      address_(options.num_nodes > 1 ? parse_address(options.rendezvous) : Address{"127.0.0.1", 0}),
      coordinator_({.num_nodes = options.num_nodes,
                    .max_restarts = options.max_restarts,
                    .run_id = make_run_id(),
                    .job_secret = make_token(),
                    .new_master_port = [this] { return new_master_port(); }}),
      join_deadline_(after(options.join_timeout)),
      notice_at_(after(kNoticeAfter)) {
  if (options.num_nodes > 1) listener_ = listen_on(address_);
  coordinator_.join(0, options.num_nodes, options.num_ranks, host_name());
}

int Leader::new_master_port() {
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
    peers_.push_back(std::make_unique<Peer>(Peer{Connection(std::move(stranger.socket))}));
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
    for (const Message& message : peer.connection.receive()) answer(peer, message);
  } catch (const LaunchError&) {
    throw;  // of this node: what the peer said made the job start, and there was no port
  } catch (const std::exception&) {
    peer.connection.close();  // it speaks something else
  }
}

void Leader::answer(Peer& peer, const Message& message) {
  if (message[0] == "hello") return welcome(peer, hello_from(message));
  if (peer.node < 0) return peer.connection.close();
  if (message[0] == "done") coordinator_.done(peer.node);
  if (message[0] == "failed") coordinator_.failed(peer.node, cause_from_fields(message, 1));
  if (message[0] == "ended") coordinator_.ended(peer.node);
}

void Leader::welcome(Peer& peer, const Hello& hello) {
  const std::string refusal = coordinator_.join(hello.node, hello.num_nodes, hello.num_local, hello.host);
  if (refusal.empty()) {
    peer.node = hello.node;
    peer.connection.send({"welcome"});
    return;
  }
  screen_.write(Stream::err, "[run] refused a launcher on " + hello.host + ": " + refusal + "\n");
  peer.connection.send({"refuse", std::to_string(kExitUsage),
                        "node 0 at " + options_.rendezvous + " refuses: " + refusal,
                        "give each node its own --node-rank and all the same --nnodes"});
  peer.connection.close();
}

void Leader::tick() {
  drop_closed();
  check_joined();
  give_up_on_silent_nodes();
  deliver();
}

void Leader::drop_closed() {
  for (const auto& stranger : strangers_) {
    if (stranger->socket && Clock::now() >= stranger->deadline) refuse_stranger(*stranger, "it says nothing");
  }
  std::erase_if(strangers_, [](const auto& stranger) { return !stranger->socket; });
  for (const auto& peer : peers_) {
    if (peer->connection.closed() && peer->node >= 0) coordinator_.lost(peer->node);
  }
  std::erase_if(peers_, [](const auto& peer) { return peer->connection.closed(); });
}

void Leader::check_joined() {
  if (coordinator_.started() || coordinator_.stopping()) return;
  const std::string who =
      "node-rank " + join_numbers(coordinator_.missing()) + " of " + std::to_string(options_.num_nodes) + " nodes";
  if (Clock::now() >= notice_at_) {
    screen_.write(Stream::err, "[run] waiting at " + options_.rendezvous + " for " + who + "\n");
    notice_at_ = kNever;
  }
  if (Clock::now() < join_deadline_) return;
  const std::string what =
      who + " did not join at " + options_.rendezvous + " within " + to_text(options_.join_timeout);
  const std::string fix = "start the missing launchers, see that they reach that address, or raise --join-timeout";
  for (const auto& peer : peers_) peer->connection.send({"refuse", std::to_string(kExitFailure), what, fix});
  throw LaunchError(kExitFailure, what, fix);
}

void Leader::give_up_on_silent_nodes() {
  if (!coordinator_.stopping()) {
    stop_deadline_ = kNever;
    return;
  }
  if (stop_deadline_ == kNever) stop_deadline_ = after(options_.grace + kSlack);
  if (Clock::now() < stop_deadline_) return;
  for (int node : coordinator_.still_ending()) {
    if (node != 0) coordinator_.lost(node);
  }
  stop_deadline_ = after(kSlack);
}

void Leader::deliver() {
  for (const auto& [node, order] : coordinator_.take_orders()) {
    if (node == 0) own_orders_.push_back(order);
    for (const auto& peer : peers_) {
      if (node != 0 && peer->node == node) peer->connection.send(to_message(order));
    }
  }
}

Time Leader::deadline() const {
  const bool joining = !coordinator_.started() && !coordinator_.stopping();
  Time next = joining ? std::min(join_deadline_, notice_at_) : stop_deadline_;
  for (const auto& stranger : strangers_) next = std::min(next, stranger->deadline);
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
