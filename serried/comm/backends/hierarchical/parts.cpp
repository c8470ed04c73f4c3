// Steps of shm's engine.
#include "serried/comm/backends/hierarchical/parts.h"

#include <algorithm>
#include <cstring>

namespace serried::hierarchical {
namespace {

using shm::Op;
using shm::Piece;
using shm::Pieces;

// Of a lane for one host, in the type of sums: fewer than a message has. A rank holds some of them for every host.
constexpr int64_t kMostPartBytes = 128 << 10;
constexpr int64_t kLeastPartBytes = 8 << 10;
constexpr int64_t kLaneBytes = 2 << 20;

int64_t part_bytes(int num_hosts) {
  return std::clamp(kLaneBytes / num_hosts / 1024 * 1024, kLeastPartBytes, kMostPartBytes);
}

}  // namespace

Parts::Parts(shm::Engine& local, const Topology& topology, const Op& op, const shm::PartialReduction& reduction)
    : local_(local),
      topology_(topology),
      op_(op),
      reduction_(reduction),
      host_(topology.host_of(local.rank())),
      lanes_(topology.lanes_of(local.rank())),
      part_elements_(part_bytes(topology.num_hosts()) / reduction.element_bytes),
      cut_(topology, op, part_elements_) {
  const auto make = [&](int64_t elements) {
    return std::make_unique_for_overwrite<char[]>(size_t(elements * op.element_bytes));
  };
  const int64_t all_elements = int64_t(topology.num_lanes()) * topology.num_hosts() * part_elements_;
  if (!cut_.is_in_a_row() && neighbours().size() > 1) packed_ = make(all_elements);
  if (is_to_root() && local.rank() != op.record.root) for_root_ = make(kMostUnderWay * most_elements());
}

int64_t Parts::most_elements() const {
  return int64_t(lanes_.end - lanes_.begin) * topology_.num_hosts() * part_elements_;
}

const char* Parts::source_of(const Cut::Part& part) const {
  return (is_all_reduce() ? op_.input : op_.offers.at(part.piece).data) + part.begin * op_.element_bytes;
}

char* Parts::result_of(int64_t chunk, int lane) const {
  const Cut::Part part = cut_.part(chunk, host_, lane);
  if (is_all_reduce()) return op_.output + part.begin * op_.element_bytes;
  if (for_root_) {
    const int64_t first = cut_.part(chunk, host_, lanes_.begin).begin;
    return for_root_.get() + (chunk % kMostUnderWay * most_elements() + part.begin - first) * op_.element_bytes;
  }
  return op_.sinks.at(local_.rank()).data + part.begin * op_.element_bytes;
}

/// The first of a row.
Cut::Part Parts::first_part(int64_t chunk) const {
  return cut_.part(chunk, is_to_root() ? topology_.host_of(op_.record.root) : 0, 0);
}

/// Of all parts whose sums `rank` makes for its host.
int64_t Parts::elements_of(int64_t chunk, int rank) const {
  const Topology::Lanes lanes = topology_.lanes_of(rank);
  int64_t elements = 0;
  for (int lane = lanes.begin; lane < lanes.end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) elements += cut_.part(chunk, host, lane).count;
  }
  return elements;
}

/// What belongs to the lanes of each, one after the other from `data` on.
Pieces Parts::pieces_of_neighbours(int64_t chunk, char* data) const {
  Pieces pieces;
  pieces.list.resize(size_t(topology_.num_ranks()));
  for (const int peer : neighbours()) {
    const int64_t bytes = elements_of(chunk, peer) * op_.element_bytes;
    pieces.list[size_t(peer)] = {.data = data, .bytes = bytes};
    data += bytes;
  }
  return pieces;
}

void Parts::add(int64_t chunk, char* out, const char* before, int num_ranks) {
  if (neighbours().size() == 1) return add_alone(chunk, out, before, num_ranks);
  Op step;
  step.kind = Op::Kind::reduce_pieces;
  step.element_bytes = op_.element_bytes;
  const char* data = cut_.is_in_a_row() ? source_of(first_part(chunk)) : pack(chunk);
  step.offers = pieces_of_neighbours(chunk, const_cast<char*>(data));
  const int64_t bytes = step.offers.at(local_.rank()).bytes;
  step.sinks = {.base = out, .stride = 0, .bytes = bytes, .list = {}, .only = local_.rank()};
  step.part = {.reduction = reduction_, .before = before, .num_ranks = num_ranks};
  run(step);
}

void Parts::add_alone(int64_t chunk, char* out, const char* before, int num_ranks) {
  for (int lane = lanes_.begin; lane < lanes_.end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const Cut::Part part = cut_.part(chunk, host, lane);
      const void* const source = source_of(part);
      reduction_.kernel(out, before, &source, 1, part.count, num_ranks);
      out += part.count * (num_ranks == 0 ? reduction_.element_bytes : op_.element_bytes);
      if (before != nullptr) before += part.count * reduction_.element_bytes;
    }
  }
}

/// Parts next to each other, as their sums will lie.
const char* Parts::pack(int64_t chunk) {
  char* to = packed_.get();
  for (int lane = 0; lane < topology_.num_lanes(); ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const Cut::Part part = cut_.part(chunk, host, lane);
      const int64_t bytes = part.count * op_.element_bytes;
      if (bytes > 0) std::memcpy(to, source_of(part), size_t(bytes));
      to += bytes;
    }
  }
  return packed_.get();
}

void Parts::give_to_root(int64_t chunk) {
  const int root = op_.record.root;
  if (host_ != topology_.host_of(root) || neighbours().size() == 1) return;
  const bool is_root = local_.rank() == root;
  Pieces sinks;
  if (is_root) {
    sinks = pieces_of_neighbours(chunk, op_.sinks.at(root).data + first_part(chunk).begin * op_.element_bytes);
  } else {
    sinks.only = local_.rank();
  }
  const int64_t bytes = elements_of(chunk, local_.rank()) * op_.element_bytes;
  exchange({.data = result_of(chunk, lanes_.begin), .bytes = bytes}, std::move(sinks));
}

void Parts::spread(int64_t chunk) {
  if (neighbours().size() == 1) return;
  Pieces sinks = pieces_of_neighbours(chunk, op_.output + first_part(chunk).begin * op_.element_bytes);
  const Piece mine = sinks.at(local_.rank());
  exchange(mine, std::move(sinks));
}

void Parts::exchange(Piece mine, Pieces sinks) {
  Op step;
  step.kind = Op::Kind::exchange;
  step.offers = {.base = mine.data, .stride = 0, .bytes = mine.bytes, .list = {}, .only = -1};
  step.sinks = std::move(sinks);
  run(step);
}

void Parts::run(Op& step) {
  step.record = op_.record;
  step.timeout = op_.timeout;
  local_.arrive_at_step(step);
  local_.complete_step(step);
}

}  // namespace serried::hierarchical
