// Chunk after chunk: add what came to what is here, pass it on; a few chunks later spread what came back.
#include "serried/comm/backends/hierarchical/chain.h"

#include <algorithm>

namespace serried::hierarchical {
namespace {

using shm::Op;
using shm::Piece;
using shm::Pieces;

int smallest_host(const Topology& topology) {
  size_t least = topology.ranks_of(0).size();
  for (int host = 1; host < topology.num_hosts(); ++host) least = std::min(least, topology.ranks_of(host).size());
  return int(least);
}

int place_of(int rank, const std::vector<int>& ranks) {
  return int(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

bool fits_chain(const Topology& topology) {
  return int(topology.runs().size()) == topology.num_hosts() && topology.num_ranks() > topology.num_hosts();
}

Chain::Chain(shm::Engine& local, Links& links, const Topology& topology, const Op& op)
    : local_(local),
      links_(links),
      topology_(topology),
      op_(op),
      reduction_(shm::find_partial_reduction(c10::ScalarType(op.record.dtype),
                                             c10d::ReduceOp::RedOpType(op.record.reduce_op))),
      host_(topology.host_of(local.rank())),
      lane_(place_of(local.rank(), topology.neighbours(local.rank()))),
      num_lanes_(smallest_host(topology)),
      part_elements_(kPartBytes / reduction_.element_bytes),
      num_chunks_((op.count + num_lanes_ * part_elements_ - 1) / (num_lanes_ * part_elements_)),
      partials_in_(size_t(num_chunks_)),
      partials_out_(size_t(num_chunks_)),
      results_in_(size_t(num_chunks_)),
      results_out_(size_t(num_chunks_)) {
  if (!has_lane()) return;
  constexpr size_t kRing = (kAhead + 1) * kPartBytes;
  if (!is_first()) came_ = std::make_unique_for_overwrite<char[]>(kRing);
  if (!is_last()) made_ = std::make_unique_for_overwrite<char[]>(kRing);
}

Chain::Part Chain::part_of(int64_t chunk, int lane) const {
  const int64_t begin = chunk * num_lanes_ * part_elements_;
  const int64_t count = std::min(num_lanes_ * part_elements_, op_.count - begin);
  const int64_t unit = std::max<int64_t>(1, kLine / op_.element_bytes);
  const int64_t share = std::min(((count + num_lanes_ - 1) / num_lanes_ + unit - 1) / unit * unit, part_elements_);
  const int64_t from = std::min(count, share * lane);
  return {.begin = begin + from, .count = std::min(share, count - from)};
}

char* Chain::partial(const std::unique_ptr<char[]>& ring, int64_t chunk) const {
  return ring.get() + chunk % (kAhead + 1) * kPartBytes;
}

std::unique_ptr<Stream> Chain::start(Stream::Direction direction, int host, char* data, int64_t bytes) {
  constexpr uint64_t kStep = 1;
  const uint64_t tag = make_tag(Purpose::data, op_.record.sequence, kStep);
  auto stream = std::make_unique<Stream>(links_.wire(), direction, peer_at(host), tag, data, bytes);
  stream->go_on();
  return stream;
}

void Chain::finish(std::unique_ptr<Stream>& stream) {
  if (!stream) return;
  const auto has_ended = [&] {
    if (stream->go_on()) return true;
    if (!stream->error().empty()) links_.fail_for_lost(stream->peer(), stream->error());
    return false;
  };
  if (!has_ended()) links_.wait(has_ended, [] {});
  stream.reset();
}

void Chain::run() {
  for (int64_t chunk = 0; chunk < std::min(kAhead, num_chunks_); ++chunk) expect(chunk);
  for (int64_t chunk = 0; chunk < num_chunks_ + kAhead; ++chunk) {
    if (chunk >= kAhead) spread(chunk - kAhead);
    if (chunk >= num_chunks_) continue;
    add(chunk);
    pass_on(chunk);
    if (chunk + kAhead < num_chunks_) expect(chunk + kAhead);
  }
  for (Streams* streams : {&partials_out_, &results_out_}) {
    for (std::unique_ptr<Stream>& stream : *streams) finish(stream);
  }
}

/// Makes room for what the host before will send.
void Chain::expect(int64_t chunk) {
  if (!has_lane() || is_first()) return;
  const int64_t bytes = part_of(chunk, lane_).count * reduction_.element_bytes;
  partials_in_[size_t(chunk)] = start(Stream::Direction::receive, host_ - 1, partial(came_, chunk), bytes);
}

/// What the ranks of this host have of this lane's part, behind what came.
void Chain::add(int64_t chunk) {
  Op step;
  step.kind = Op::Kind::reduce_pieces;
  step.record = op_.record;
  step.timeout = op_.timeout;
  step.element_bytes = op_.element_bytes;
  step.offers.list.resize(size_t(topology_.num_ranks()));
  const std::vector<int>& neighbours = topology_.neighbours(local_.rank());
  for (int lane = 0; lane < num_lanes_; ++lane) {
    const Part part = part_of(chunk, lane);
    step.offers.list[size_t(neighbours[size_t(lane)])] = {
        .data = const_cast<char*>(op_.input) + part.begin * op_.element_bytes, .bytes = part.count * op_.element_bytes};
  }
  const Part mine = has_lane() ? part_of(chunk, lane_) : Part{};
  if (chunk > kAhead && has_lane() && !is_last()) finish(partials_out_[size_t(chunk - kAhead - 1)]);
  char* const out = !has_lane() ? nullptr
                    : is_last() ? op_.output + mine.begin * op_.element_bytes
                                : partial(made_, chunk);
  step.sinks = {.base = out, .stride = 0, .bytes = mine.count * op_.element_bytes, .list = {}, .only = local_.rank()};
  finish(partials_in_[size_t(chunk)]);
  step.part = {.reduction = reduction_,
               .before = is_first() || !has_lane() ? nullptr : partial(came_, chunk),
               .num_ranks = is_last() ? topology_.num_ranks() : 0};
  local_.arrive_at_step(step);
  local_.complete_step(step);
}

void Chain::pass_on(int64_t chunk) {
  if (!has_lane()) return;
  const Part mine = part_of(chunk, lane_);
  char* const result = op_.output + mine.begin * op_.element_bytes;
  const int64_t bytes = mine.count * op_.element_bytes;
  if (is_last()) {
    results_out_[size_t(chunk)] = start(Stream::Direction::send, host_ - 1, result, bytes);
    return;
  }
  const int64_t partial_bytes = mine.count * reduction_.element_bytes;
  partials_out_[size_t(chunk)] = start(Stream::Direction::send, host_ + 1, partial(made_, chunk), partial_bytes);
  results_in_[size_t(chunk)] = start(Stream::Direction::receive, host_ + 1, result, bytes);
}

/// The result, once it is here: to the host before, and to neighbours.
void Chain::spread(int64_t chunk) {
  finish(results_in_[size_t(chunk)]);
  if (has_lane() && !is_first() && !is_last()) {
    const Part mine = part_of(chunk, lane_);
    results_out_[size_t(chunk)] = start(Stream::Direction::send, host_ - 1, op_.output + mine.begin * op_.element_bytes,
                                        mine.count * op_.element_bytes);
  }
  const std::vector<int>& neighbours = topology_.neighbours(local_.rank());
  if (neighbours.size() < 2) return;
  Op step;
  step.kind = Op::Kind::exchange;
  step.record = op_.record;
  step.timeout = op_.timeout;
  step.sinks.list.resize(size_t(topology_.num_ranks()));
  for (int lane = 0; lane < num_lanes_; ++lane) {
    const Part part = part_of(chunk, lane);
    step.sinks.list[size_t(neighbours[size_t(lane)])] = {.data = op_.output + part.begin * op_.element_bytes,
                                                         .bytes = part.count * op_.element_bytes};
  }
  const Piece mine = step.sinks.at(local_.rank());
  step.offers = {.base = mine.data, .stride = 0, .bytes = mine.bytes, .list = {}, .only = -1};
  local_.arrive_at_step(step);
  local_.complete_step(step);
}

}  // namespace serried::hierarchical
