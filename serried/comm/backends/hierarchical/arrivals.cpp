// What ranks tell each other at the start of a collective.
#include <algorithm>
#include <cstring>
#include <new>

#include <c10/util/StringUtil.h>

#include "serried/comm/backends/hierarchical/engine.h"

namespace serried::hierarchical {
namespace {

using net::Transfer;

// More than any machine has: a size beyond it is no size.
constexpr int64_t kMaxPieceBytes = int64_t(1) << 42;

constexpr int64_t kTable = -1;  // the piece_bytes of an arrival with a table

int64_t align(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

int64_t* table_of(Arrival& arrival) {
  return reinterpret_cast<int64_t*>(&arrival + 1);
}

const int64_t* table_of(const Arrival& arrival) {
  return reinterpret_cast<const int64_t*>(&arrival + 1);
}

int64_t head_bytes(const Arrival& arrival, int num_ranks) {
  return int64_t(sizeof(Arrival)) + (arrival.piece_bytes == kTable ? align(num_ranks * int64_t(sizeof(int64_t))) : 0);
}

int64_t total_bytes(const Arrival& arrival, int num_ranks) {
  if (arrival.piece_bytes != kTable) return arrival.piece_bytes * (arrival.one_per_peer != 0 ? num_ranks : 1);
  int64_t total = 0;
  for (int rank = 0; rank < num_ranks; ++rank) total += table_of(arrival)[rank];
  return total;
}

/// Says in `arrival` how large the pieces are.
void describe(Arrival& arrival, const Op& op, int num_ranks) {
  const Pieces& offers = op.offers;
  arrival.one_per_peer = 0;
  arrival.piece_bytes = 0;
  if (op.kind == Op::Kind::barrier) return;
  if (op.kind == Op::Kind::all_reduce) {
    arrival.piece_bytes = op.count * op.element_bytes;
  } else if (offers.list.empty() && offers.only < 0 && (offers.stride == 0 || offers.stride == offers.bytes)) {
    arrival.piece_bytes = offers.bytes;
    arrival.one_per_peer = offers.stride != 0 ? 1 : 0;
  } else {
    arrival.piece_bytes = kTable;
    for (int rank = 0; rank < num_ranks; ++rank) table_of(arrival)[rank] = offers.at(rank).bytes;
  }
}

void copy_pieces(char* to, const Arrival& arrival, const Op& op, int num_ranks) {
  if (op.kind == Op::Kind::barrier) return;
  if (op.kind == Op::Kind::all_reduce || arrival.piece_bytes != kTable) {
    const char* from = op.kind == Op::Kind::all_reduce ? op.input : op.offers.base;
    const int64_t bytes = total_bytes(arrival, num_ranks);
    if (bytes > 0) std::memcpy(to, from, size_t(bytes));
    return;
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Piece piece = op.offers.at(rank);
    if (piece.bytes > 0) std::memcpy(to, piece.data, size_t(piece.bytes));
    to += piece.bytes;
  }
}

}  // namespace

int64_t Arrival::room(int num_ranks) {
  return int64_t(sizeof(Arrival)) + align(num_ranks * int64_t(sizeof(int64_t))) + kMostCarried;
}

Arrival& HierarchicalEngine::arrival_of(int rank, const Op& op) const {
  return *reinterpret_cast<Arrival*>(segment().arrival(rank, int(op.record.sequence & 1)));
}

bool HierarchicalEngine::has_come(int rank, const Op& op) const {
  return segment().info(rank).page.newest.load(std::memory_order_acquire) >= op.record.sequence;
}

/// How many bytes there are to tell.
int64_t HierarchicalEngine::lay_out_arrival(const Op& op) {
  Arrival& mine = arrival_of(rank(), op);
  mine.record = op.record;
  mine.fingerprint = watch::fingerprint(op.record);
  describe(mine, op, world_size());
  const int64_t head = head_bytes(mine, world_size());
  const int64_t total = total_bytes(mine, world_size());
  mine.carries = total <= Arrival::kMostCarried ? 1 : 0;
  if (mine.carries == 0) return head;
  copy_pieces(reinterpret_cast<char*>(&mine) + head, mine, op, world_size());
  return head + total;
}

void HierarchicalEngine::post_arrivals(const Op& op, int64_t bytes) {
  const uint64_t tag = make_tag(Purpose::arrival, op.record.sequence);
  for (Post& post : coming_) {
    post.taken = false;
    post.transfer = {};
    links_.wire().receive(post.transfer, post.peer, tag, &arrival_of(post.peer, op),
                          size_t(Arrival::room(world_size())));
  }
  for (Post& post : going_) {
    post.transfer = {};
    links_.wire().send(post.transfer, post.peer, tag, &arrival_of(rank(), op), size_t(bytes));
  }
}

/// Whether all have been taken that this rank receives.
bool HierarchicalEngine::take_arrivals(const Op& op) {
  bool all = true;
  for (Post& post : coming_) {
    if (!post.taken && post.transfer.ended()) take(post, op);
    all &= post.taken;
  }
  return all;
}

void HierarchicalEngine::take(Post& post, const Op& op) {
  if (post.transfer.state != Transfer::State::done) links_.fail_for_lost(post.peer, post.transfer.error);
  const Arrival& arrival = arrival_of(post.peer, op);
  const std::string problem = problem_of(arrival, int64_t(post.transfer.bytes));
  if (!problem.empty()) {
    sync().fail(c10::str("rank ", post.peer, " sends ", problem, " as its part of ", watch::describe(op.record)),
                "find out who else sends messages to this job, or let all ranks run the same version of serried");
  }
  post.taken = true;
  shm::RankInfo& info = segment().info(post.peer);
  info.records[op.record.sequence & 1] = arrival.record;
  info.page.newest.store(op.record.sequence, std::memory_order_release);
}

/// What is wrong with a message of `bytes`; empty if nothing is.
std::string HierarchicalEngine::problem_of(const Arrival& arrival, int64_t bytes) const {
  if (bytes < int64_t(sizeof(Arrival))) return c10::str("a message of ", bytes, " bytes");
  if (arrival.piece_bytes < kTable || arrival.piece_bytes > kMaxPieceBytes) {
    return c10::str("a piece of ", arrival.piece_bytes, " bytes");
  }
  const int64_t head = head_bytes(arrival, world_size());
  if (bytes < head) return c10::str("a message of ", bytes, " bytes");
  for (int rank = 0; arrival.piece_bytes == kTable && rank < world_size(); ++rank) {
    const int64_t piece = table_of(arrival)[rank];
    if (piece < 0 || piece > kMaxPieceBytes) return c10::str("a piece of ", piece, " bytes");
  }
  const int64_t expected = head + (arrival.carries != 0 ? total_bytes(arrival, world_size()) : 0);
  return bytes == expected ? "" : c10::str("a message of ", bytes, " bytes instead of ", expected);
}

/// Until all ranks have come, and called the same.
void HierarchicalEngine::meet(const Op& op) {
  links_.wait([&] { return take_arrivals(op); }, [&] { look_for_mismatch(op); });
  sync().post();
  sync().wait_all();
  compare(op);
}

void HierarchicalEngine::compare(const Op& op) {
  for (int other = 0; other < world_size(); ++other) {
    if (disagree(rank(), other, op)) fail_for_mismatch(op);
  }
}

bool HierarchicalEngine::disagree(int rank, int other, const Op& op) const {
  const Arrival& one = arrival_of(rank, op);
  const Arrival& two = arrival_of(other, op);
  return one.fingerprint != two.fingerprint && !watch::differ_in_knowledge(one.record, two.record);
}

/// Names the first ranks that disagree of those that have come: once all have, all ranks name the same.
void HierarchicalEngine::fail_for_mismatch(const Op& op) {
  const watch::Record before = segment().info(rank()).records[(op.record.sequence & 1) ^ 1];
  for (int one = 0; one < world_size(); ++one) {
    for (int two = one + 1; two < world_size() && has_come(one, op); ++two) {
      if (!has_come(two, op) || !disagree(one, two, op)) continue;
      const watch::Record& first = arrival_of(one, op).record;
      const watch::Record& second = arrival_of(two, op).record;
      sync().fail(watch::mismatch_text(one, first, two, second, before), watch::mismatch_fix(first, second));
    }
  }
}

/// Ranks that disagree are told before all have come; but those on their way get a moment, so that all name the same.
void HierarchicalEngine::look_for_mismatch(const Op& op) {
  for (int other = 0; other < world_size(); ++other) {
    if (!has_come(other, op) || !disagree(rank(), other, op)) continue;
    if (disagreement_ == op.record.sequence) fail_for_mismatch(op);
    disagreement_ = op.record.sequence;
    return;
  }
}

void HierarchicalEngine::end_posts(bool cancel) {
  if (!cancel) {
    const auto all_left = [&] {
      return std::all_of(going_.begin(), going_.end(), [](const Post& post) { return post.transfer.ended(); });
    };
    if (!all_left()) links_.wait(all_left, [] {});
    for (const Post& post : going_) {
      if (post.transfer.state == Transfer::State::failed) links_.fail_for_lost(post.peer, post.transfer.error);
    }
    return;
  }
  for (std::deque<Post>* posts : {&coming_, &going_}) {
    for (Post& post : *posts) {
      if (!post.transfer.ended()) links_.wire().cancel(post.transfer);
    }
  }
}

int64_t HierarchicalEngine::offered_bytes(int from, int to, const Op& op) const {
  const Arrival& arrival = arrival_of(from, op);
  return arrival.piece_bytes == kTable ? table_of(arrival)[to] : arrival.piece_bytes;
}

Piece HierarchicalEngine::offered(int from, int to, const Op& op) const {
  Arrival& arrival = arrival_of(from, op);
  char* data = reinterpret_cast<char*>(&arrival) + head_bytes(arrival, world_size());
  const bool has_table = arrival.piece_bytes == kTable;
  const int64_t bytes = offered_bytes(from, to, op);
  if (arrival.carries == 0) return {.data = nullptr, .bytes = bytes};
  if (!has_table) return {.data = data + (arrival.one_per_peer != 0 ? to * bytes : 0), .bytes = bytes};
  for (int before = 0; before < to; ++before) data += table_of(arrival)[before];
  return {.data = data, .bytes = bytes};
}

void HierarchicalEngine::check_size(int peer, int64_t offered, int64_t expected, const Op& op) {
  if (offered == expected) return;
  sync().fail(c10::str("rank ", peer, " gives ", offered, " bytes where rank ", rank(), " expects ", expected, " in ",
                       watch::describe(op.record)),
              "let the sizes that a rank sends and its peer expects agree");
}

}  // namespace serried::hierarchical
