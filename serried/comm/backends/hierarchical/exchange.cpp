// Pieces that move: between neighbours in the memory of their host, between hosts in streams.
#include <algorithm>
#include <cstring>

#include "serried/comm/backends/hierarchical/engine.h"
#include "serried/comm/collectives/rows.h"

namespace serried::hierarchical {
namespace {

using watch::Kind;

/// Of these only the root gives, or takes.
bool has_root(const watch::Record& record) {
  return record.kind == Kind::gather || record.kind == Kind::scatter || record.kind == Kind::reduce;
}

/// Of these every rank that has a piece has the same one for all others.
bool is_shared(const watch::Record& record) {
  return record.kind == Kind::all_gather || record.kind == Kind::broadcast;
}

}  // namespace

std::vector<bool> HierarchicalEngine::carried(const Op& op) const {
  std::vector<bool> all;
  for (int peer = 0; peer < world_size(); ++peer) all.push_back(carries(peer, op));
  return all;
}

void HierarchicalEngine::exchange(const Op& op) {
  for (int peer = 0; peer < world_size(); ++peer) {
    const bool takes = op.sinks.only < 0 || op.sinks.only == peer;
    if (peer != rank() && takes) check_size(peer, offered(peer, rank(), op).bytes, op.sinks.at(peer).bytes, op);
  }
  const Piece own = op.offers.at(rank());
  const Piece own_sink = op.sinks.at(rank());
  if (own_sink.bytes > 0 && own_sink.data != own.data) lay_down(rank(), op, own.data, own_sink.bytes);
  for (int peer = 0; peer < world_size(); ++peer) {
    const Piece sink = op.sinks.at(peer);
    if (peer != rank() && sink.bytes > 0 && carries(peer, op)) {
      lay_down(peer, op, offered(peer, rank(), op).data, sink.bytes);
    }
  }
  if (!op.rows.empty()) return exchange_rows(op);
  const std::vector<bool> has_come = carried(op);
  if (is_shared(op.record)) return move_shared(op, own, op.sinks, has_come);
  Pieces offers = op.offers;
  if (op.record.kind == Kind::gather) offers.only = op.record.root;
  move_each(op, offers, op.sinks, has_come);
}

/// All of what `from` gives this rank, where it belongs.
void HierarchicalEngine::lay_down(int from, const Op& op, const char* data, int64_t bytes) const {
  const Piece sink = op.sinks.at(from);
  if (op.rows.empty()) {
    std::memcpy(sink.data, data, size_t(bytes));
    return;
  }
  const detail::RowTable table{op.rows, world_size(), op.element_bytes};
  detail::place_rows(table, from, {.data = data, .begin = 0, .end = bytes}, sink.data);
}

/// Rows find their places from memory in between, since what comes may be cut anywhere.
void HierarchicalEngine::exchange_rows(const Op& op) {
  const std::vector<bool> has_come = carried(op);
  Pieces between;
  int64_t total = 0;
  for (int peer = 0; peer < world_size(); ++peer) total += has_come[size_t(peer)] ? 0 : op.sinks.at(peer).bytes;
  scratch_.resize(size_t(total));
  int64_t begin = 0;
  for (int peer = 0; peer < world_size(); ++peer) {
    const int64_t bytes = has_come[size_t(peer)] ? 0 : op.sinks.at(peer).bytes;
    between.list.push_back(peer == rank() ? op.offers.at(peer) : Piece{scratch_.data() + begin, bytes});
    begin += bytes;
  }
  move_shared(op, op.offers.at(rank()), between, has_come);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank() || between.at(peer).bytes == 0) continue;
    lay_down(peer, op, between.at(peer).data, between.at(peer).bytes);
  }
}

void HierarchicalEngine::move_each(const Op& op, const Pieces& offers, const Pieces& sinks,
                                   const std::vector<bool>& skip) {
  ++num_steps_;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (is_neighbour(peer)) continue;
    if (!skip[size_t(rank())]) send(peer, offers.at(peer));
    if (!skip[size_t(peer)]) receive(peer, sinks.at(peer));
  }
  go_on_with_streams();
  const bool takes_part = !has_root(op.record) || is_neighbour(op.record.root);
  if (takes_part && neighbours_exchange(op, skip)) run_local_step(op, offers, sinks);
  finish_streams();
}

void HierarchicalEngine::move_shared(const Op& op, Piece mine, const Pieces& sinks, const std::vector<bool>& skip) {
  ++num_steps_;
  const bool in_a_line =
      op.record.kind == Kind::broadcast && topology_.num_hosts() > 2 && !skip[size_t(op.record.root)];
  for (const int peer : receivers_) {
    if (!in_a_line && !skip[size_t(rank())]) send(peer, mine);
  }
  for (const int peer : tellers_) {
    if (!in_a_line && !skip[size_t(peer)]) receive(peer, sinks.at(peer));
  }
  go_on_with_streams();
  if (neighbours_exchange(op, skip)) {
    run_local_step(op, {.base = mine.data, .stride = 0, .bytes = mine.bytes, .list = {}, .only = -1}, sinks);
  }
  finish_streams();
  if (in_a_line) pass_down_the_line(op, sinks.at(op.record.root));
  share_with_neighbours(op, sinks, skip);
}

/// Whether there is anything that has not come, between the ranks of this host. All of them see the same.
bool HierarchicalEngine::neighbours_exchange(const Op&, const std::vector<bool>& skip) const {
  const std::vector<int>& all = neighbours();
  return all.size() > 1 && !std::all_of(all.begin(), all.end(), [&](int peer) { return skip[size_t(peer)]; });
}

/// What one neighbour has received for all, in as many rounds as the one with the most pieces needs.
void HierarchicalEngine::share_with_neighbours(const Op& op, const Pieces& sinks, const std::vector<bool>& skip) {
  if (neighbours().size() < 2) return;
  std::vector<std::vector<int>> received(static_cast<size_t>(world_size()));
  size_t rounds = 0;
  for (int other = 0; other < world_size(); ++other) {
    if (is_neighbour(other) || skip[size_t(other)] || sinks.at(other).bytes == 0) continue;
    std::vector<int>& of_one = received[size_t(topology_.receiver(other, topology_.host_of(rank())))];
    of_one.push_back(other);
    rounds = std::max(rounds, of_one.size());
  }
  for (size_t round = 0; round < rounds; ++round) {
    Pieces pieces;
    pieces.list.resize(size_t(world_size()));
    for (const int peer : neighbours()) {
      const std::vector<int>& of_one = received[size_t(peer)];
      if (round < of_one.size()) pieces.list[size_t(peer)] = sinks.at(of_one[round]);
    }
    const Piece mine = pieces.at(rank());
    run_local_step(op, {.base = mine.data, .stride = 0, .bytes = mine.bytes, .list = {}, .only = -1}, pieces);
  }
}

void HierarchicalEngine::run_local_step(const Op& op, Pieces offers, Pieces sinks) {
  Op step;
  step.kind = Op::Kind::exchange;
  step.record = op.record;
  step.timeout = op.timeout;
  step.offers = std::move(offers);
  step.sinks = std::move(sinks);
  local_->arrive_at_step(step);
  local_->complete_step(step);
}

void HierarchicalEngine::send(int peer, Piece piece) {
  if (piece.bytes == 0) return;
  const uint64_t tag = make_tag(Purpose::data, sequence(), num_steps_);
  streams_.emplace_back(links_.wire(), Stream::Direction::send, peer, tag, piece.data, piece.bytes);
}

void HierarchicalEngine::receive(int peer, Piece piece) {
  if (piece.bytes == 0) return;
  const uint64_t tag = make_tag(Purpose::data, sequence(), num_steps_);
  streams_.emplace_back(links_.wire(), Stream::Direction::receive, peer, tag, piece.data, piece.bytes);
}

/// Whether all have ended.
bool HierarchicalEngine::go_on_with_streams() {
  bool all = true;
  for (Stream& stream : streams_) all &= stream.go_on();
  return all;
}

void HierarchicalEngine::finish_streams() {
  const auto all_have_ended = [this] {
    if (go_on_with_streams()) return true;
    for (const Stream& stream : streams_) {
      if (!stream.error().empty()) links_.fail_for_lost(stream.peer(), stream.error());
    }
    return false;
  };
  if (!all_have_ended()) links_.wait(all_have_ended, [] {});
  streams_.clear();
}

}  // namespace serried::hierarchical
