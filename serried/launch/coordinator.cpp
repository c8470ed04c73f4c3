// The state machine of a job.
#include "serried/launch/coordinator.h"

#include <algorithm>
#include <utility>

namespace serried::launch {
namespace {

// More than any host runs; the sum over all nodes has to stay a number.
constexpr int kMostLocalRanks = 1 << 16;

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options)
    : options_(std::move(options)), nodes_(static_cast<size_t>(options_.num_nodes)) {}

std::string Coordinator::join(int node, int num_nodes, int num_local, const std::string& host) {
  if (num_nodes != options_.num_nodes) {
    return "this node was started with --nnodes " + std::to_string(num_nodes) + ", node 0 with --nnodes " +
           std::to_string(options_.num_nodes);
  }
  if (node < 0 || node >= options_.num_nodes) return "there is no node-rank " + std::to_string(node);
  if (num_local < 1 || num_local > kMostLocalRanks) return "it brings " + std::to_string(num_local) + " ranks";
  Node& entry = nodes_[static_cast<size_t>(node)];
  if (entry.state != State::missing) {
    return "--node-rank " + std::to_string(node) + " is taken by " + entry.host;
  }
  entry = {.state = State::running, .num_local = num_local, .host = host};
  if (missing().empty()) start();
  return "";
}

void Coordinator::start() {
  ++attempt_;
  cause_.reset();
  int world_size = 0;
  for (const Node& node : nodes_) world_size += node.num_local;
  Order order{.kind = Order::Kind::start,
              .assignment = {.attempt = attempt_,
                             .max_restarts = options_.max_restarts,
                             .world_size = world_size,
                             .num_nodes = options_.num_nodes,
                             .master_port = options_.new_master_port(),
                             .run_id = options_.run_id,
                             .job_secret = options_.job_secret}};
  int first_rank = 0;
  for (int node = 0; node < options_.num_nodes; ++node) {
    Node& entry = nodes_[static_cast<size_t>(node)];
    entry.state = State::running;
    order.assignment.node_rank = node;
    order.assignment.num_local = entry.num_local;
    order.assignment.first_rank = std::exchange(first_rank, first_rank + entry.num_local);
    orders_.push_back({node, order});
  }
}

void Coordinator::done(int node) {
  nodes_[static_cast<size_t>(node)].state = State::done;
  const bool all = std::all_of(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.state == State::done; });
  if (!all || concluded_ || cause_) return;
  concluded_ = true;
  order_all({.kind = Order::Kind::exit, .exit_code = 0});
}

void Coordinator::failed(int node, Cause cause) {
  cause.node = node;
  cause.host = nodes_[static_cast<size_t>(node)].host;
  stop(cause);
}

void Coordinator::stop(const Cause& cause) {
  if (concluded_) return;
  const bool overrides = cause.kind == Cause::Kind::interrupted && cause_ && cause_->kind == Cause::Kind::rank_failed;
  if (overrides) cause_ = cause;  // they are stopping already; now they must not start again
  if (cause_) return;
  cause_ = cause;
  order_all({.kind = Order::Kind::stop, .cause = cause});
  if (started()) return;
  concluded_ = true;
  order_all({.kind = Order::Kind::exit, .exit_code = exit_code(cause)});
}

void Coordinator::ended(int node) {
  Node& entry = nodes_[static_cast<size_t>(node)];
  if (entry.state != State::lost) entry.state = State::ended;
  conclude_if_all_ended();
}

void Coordinator::lost(int node) {
  Node& entry = nodes_[static_cast<size_t>(node)];
  if (concluded_ || entry.state == State::lost) return;
  if (!started()) {
    entry = {};  // it may come again
    return;
  }
  entry.state = State::lost;
  stop({.kind = Cause::Kind::node_lost, .node = node, .host = entry.host});
  conclude_if_all_ended();
}

void Coordinator::conclude_if_all_ended() {
  if (concluded_ || !cause_ || !still_ending().empty()) return;
  const bool any_lost = std::any_of(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.state == State::lost; });
  if (cause_->kind == Cause::Kind::rank_failed && !any_lost && attempt_ < options_.max_restarts) return start();
  concluded_ = true;
  order_all({.kind = Order::Kind::exit, .exit_code = exit_code(*cause_)});
}

void Coordinator::order_all(const Order& order) {
  for (int node = 0; node < options_.num_nodes; ++node) {
    if (nodes_[static_cast<size_t>(node)].state != State::lost) orders_.push_back({node, order});
  }
}

std::vector<NodeOrder> Coordinator::take_orders() {
  return std::exchange(orders_, {});
}

std::vector<int> Coordinator::missing() const {
  std::vector<int> result;
  for (int node = 0; node < options_.num_nodes; ++node) {
    if (nodes_[static_cast<size_t>(node)].state == State::missing) result.push_back(node);
  }
  return result;
}

std::vector<int> Coordinator::still_ending() const {
  std::vector<int> result;
  for (int node = 0; node < options_.num_nodes; ++node) {
    const State state = nodes_[static_cast<size_t>(node)].state;
    if (state != State::ended && state != State::lost) result.push_back(node);
  }
  return result;
}

}  // namespace serried::launch
