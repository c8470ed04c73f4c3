// Chunk after chunk, in stages: sums leave; some chunks later those of others are joined and results leave; some chunks
// later results are spread.
#include "serried/comm/backends/hierarchical/sums.h"

#include <algorithm>
#include <cstring>

namespace serried::hierarchical {
namespace {

using shm::Op;
using shm::Piece;
using shm::Pieces;

// Of a lane for one host, in the type of sums. A rank holds some of them for every host.
constexpr int64_t kMostPartBytes = 128 << 10;
constexpr int64_t kLeastPartBytes = 8 << 10;
constexpr int64_t kLaneBytes = 2 << 20;

int64_t part_bytes(int num_hosts) {
  return std::clamp(kLaneBytes / num_hosts / 1024 * 1024, kLeastPartBytes, kMostPartBytes);
}

Pieces only_one(Piece piece, int only) {
  return {.base = piece.data, .stride = 0, .bytes = piece.bytes, .list = {}, .only = only};
}

}  // namespace

HostSums::HostSums(shm::Engine& local, Links& links, const Topology& topology, const Op& op,
                   OrderedReduction& reduction)
    : local_(local),
      links_(links),
      topology_(topology),
      op_(op),
      reduction_(reduction),
      host_(topology.host_of(local.rank())),
      lanes_(topology.lanes_of(local.rank())),
      part_elements_(part_bytes(topology.num_hosts()) / reduction.part().element_bytes),
      cut_(topology, op, part_elements_),
      flights_(size_t(cut_.num_chunks())) {
  const auto make = [](int64_t bytes) { return std::make_unique_for_overwrite<char[]>(size_t(bytes)); };
  const int64_t own_elements = int64_t(lanes_.end - lanes_.begin) * topology.num_hosts() * part_elements_;
  const int64_t all_elements = int64_t(topology.num_lanes()) * topology.num_hosts() * part_elements_;
  sums_ = make((kLag + 1) * own_elements * reduction.part().element_bytes);
  came_ = make((2 * kLag + 1) * own_elements * reduction.part().element_bytes);
  if (!cut_.is_in_a_row() && neighbours().size() > 1) packed_ = make(all_elements * op.element_bytes);
  if (is_to_root()) for_root_ = make(own_elements * op.element_bytes);
}

const char* HostSums::source_of(const Cut::Part& part) const {
  return (is_all_reduce() ? op_.input : op_.offers.at(part.piece).data) + part.begin * op_.element_bytes;
}

/// Where this rank lays the result of its part of a lane.
char* HostSums::result_of(int64_t chunk, int lane) const {
  const Cut::Part part = cut_.part(chunk, host_, lane);
  if (is_all_reduce()) return op_.output + part.begin * op_.element_bytes;
  if (is_to_root() && local_.rank() != op_.record.root) {
    return for_root_.get() + (part.begin - cut_.part(chunk, host_, lanes_.begin).begin) * op_.element_bytes;
  }
  return op_.sinks.at(local_.rank()).data + part.begin * op_.element_bytes;
}

char* HostSums::sums_at(int64_t chunk) const {
  const int64_t stride = int64_t(lanes_.end - lanes_.begin) * topology_.num_hosts() * part_elements_;
  return sums_.get() + chunk % (kLag + 1) * stride * reduction_.part().element_bytes;
}

char* HostSums::came_at(int64_t chunk, int lane, int host) const {
  const int64_t index = (chunk % (2 * kLag + 1) * (lanes_.end - lanes_.begin) + lane - lanes_.begin);
  return came_.get() + (index * topology_.num_hosts() + host) * part_elements_ * reduction_.part().element_bytes;
}

/// Of all parts whose sums `rank` makes for its host.
int64_t HostSums::elements_of(int64_t chunk, int rank) const {
  const Topology::Lanes lanes = topology_.lanes_of(rank);
  int64_t elements = 0;
  for (int lane = lanes.begin; lane < lanes.end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) elements += cut_.part(chunk, host, lane).count;
  }
  return elements;
}

void HostSums::start(Streams& streams, Stream::Direction direction, int peer, Stage stage, int lane, char* data,
                     int64_t bytes) {
  if (bytes == 0) return;
  const uint64_t tag = make_tag(Purpose::data, op_.record.sequence, 1 + 2 * uint64_t(lane) + uint64_t(stage));
  streams.push_back(std::make_unique<Stream>(links_.wire(), direction, peer, tag, data, bytes));
  streams.back()->go_on();
}

void HostSums::finish(Streams& streams) {
  const auto have_ended = [&] {
    for (const std::unique_ptr<Stream>& stream : streams) {
      if (stream->go_on()) continue;
      if (!stream->error().empty()) links_.fail_for_lost(stream->peer(), stream->error());
      return false;
    }
    return true;
  };
  if (!have_ended()) links_.wait(have_ended, [] {});
  streams.clear();
}

void HostSums::run() {
  const int64_t num_chunks = cut_.num_chunks();
  for (int64_t chunk = 0; chunk < std::min(kLag, num_chunks); ++chunk) expect(chunk);
  for (int64_t chunk = 0; chunk < num_chunks + 2 * kLag; ++chunk) {
    if (chunk + kLag < num_chunks) expect(chunk + kLag);
    if (chunk < num_chunks) {
      add(chunk);
      send_sums(chunk);
    }
    if (chunk >= kLag && chunk - kLag < num_chunks) join(chunk - kLag);
    if (chunk >= 2 * kLag && is_all_reduce()) spread(chunk - 2 * kLag);
  }
  for (Flight& flight : flights_) {
    finish(flight.sums_out);
    finish(flight.results_out);
  }
}

/// Makes room for what other hosts will send.
void HostSums::expect(int64_t chunk) {
  for (int lane = lanes_.begin; lane < lanes_.end; ++lane) {
    const int64_t bytes = cut_.part(chunk, host_, lane).count * reduction_.part().element_bytes;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      if (host == host_) continue;
      start(flights_[size_t(chunk)].sums_in, Stream::Direction::receive, topology_.rank_at(host, lane), Stage::sums,
            lane, came_at(chunk, lane, host), bytes);
    }
  }
}

/// What the ranks of this host have of this rank's lanes, for all hosts.
void HostSums::add(int64_t chunk) {
  if (chunk > kLag) finish(flights_[size_t(chunk - kLag - 1)].sums_out);  // of the memory that is used now
  if (neighbours().size() > 1) return add_with_neighbours(chunk);
  char* out = sums_at(chunk);
  for (int lane = lanes_.begin; lane < lanes_.end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const Cut::Part part = cut_.part(chunk, host, lane);
      const void* const source = source_of(part);
      reduction_.part().kernel(out, nullptr, &source, 1, part.count, 0);
      out += part.count * reduction_.part().element_bytes;
    }
  }
}

void HostSums::add_with_neighbours(int64_t chunk) {
  Op step;
  step.kind = Op::Kind::reduce_pieces;
  step.record = op_.record;
  step.timeout = op_.timeout;
  step.element_bytes = op_.element_bytes;
  step.offers.list.resize(size_t(topology_.num_ranks()));
  char* data = const_cast<char*>(cut_.is_in_a_row() ? source_of(first_part(chunk)) : pack(chunk));
  for (const int peer : neighbours()) {
    const int64_t bytes = elements_of(chunk, peer) * op_.element_bytes;
    step.offers.list[size_t(peer)] = {.data = data, .bytes = bytes};
    data += bytes;
  }
  step.sinks = only_one({sums_at(chunk), step.offers.at(local_.rank()).bytes}, local_.rank());
  step.part = {.reduction = reduction_.part(), .before = nullptr, .num_ranks = 0};
  local_.arrive_at_step(step);
  local_.complete_step(step);
}

/// The first of a row.
Cut::Part HostSums::first_part(int64_t chunk) const {
  return cut_.part(chunk, is_to_root() ? topology_.host_of(op_.record.root) : 0, 0);
}

/// Parts next to each other, as their sums will lie.
const char* HostSums::pack(int64_t chunk) {
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

void HostSums::send_sums(int64_t chunk) {
  Flight& flight = flights_[size_t(chunk)];
  char* sums = sums_at(chunk);
  for (int lane = lanes_.begin; lane < lanes_.end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const Cut::Part part = cut_.part(chunk, host, lane);
      const int64_t bytes = part.count * reduction_.part().element_bytes;
      const int peer = topology_.rank_at(host, lane);
      if (host != host_) {
        start(flight.sums_out, Stream::Direction::send, peer, Stage::sums, lane, sums, bytes);
        if (is_all_reduce()) {
          start(flight.results_in, Stream::Direction::receive, peer, Stage::results, lane,
                op_.output + part.begin * op_.element_bytes, part.count * op_.element_bytes);
        }
      }
      sums += bytes;
    }
  }
}

/// Makes the results of this rank's parts.
void HostSums::join(int64_t chunk) {
  Flight& flight = flights_[size_t(chunk)];
  finish(flight.sums_in);
  const char* own = sums_at(chunk);
  for (int lane = lanes_.begin; lane < lanes_.end; ++lane) {
    const int64_t count = cut_.part(chunk, host_, lane).count;
    std::vector<const char*> sums;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      sums.push_back(host == host_ ? own : came_at(chunk, lane, host));
      own += cut_.part(chunk, host, lane).count * reduction_.part().element_bytes;
    }
    char* const result = result_of(chunk, lane);
    reduction_.join(result, sums, count);
    for (int host = 0; host < topology_.num_hosts() && is_all_reduce(); ++host) {
      if (host == host_) continue;
      start(flight.results_out, Stream::Direction::send, topology_.rank_at(host, lane), Stage::results, lane, result,
            count * op_.element_bytes);
    }
  }
  if (is_to_root()) give_to_root(chunk);
}

/// Neighbours of the root have made parts of its result.
void HostSums::give_to_root(int64_t chunk) {
  const int root = op_.record.root;
  if (host_ != topology_.host_of(root) || neighbours().size() < 2) return;
  Pieces sinks;
  if (local_.rank() == root) {
    sinks.list.resize(size_t(topology_.num_ranks()));
    char* data = op_.sinks.at(root).data + first_part(chunk).begin * op_.element_bytes;
    for (const int peer : neighbours()) {
      const int64_t bytes = elements_of(chunk, peer) * op_.element_bytes;
      sinks.list[size_t(peer)] = {.data = data, .bytes = bytes};
      data += bytes;
    }
  } else {
    sinks = only_one({}, local_.rank());
  }
  const int64_t bytes = elements_of(chunk, local_.rank()) * op_.element_bytes;
  exchange_locally({.base = result_of(chunk, lanes_.begin), .stride = 0, .bytes = bytes, .list = {}, .only = -1},
                   std::move(sinks));
}

/// Results have come from all hosts: to neighbours.
void HostSums::spread(int64_t chunk) {
  finish(flights_[size_t(chunk)].results_in);
  if (neighbours().size() < 2) return;
  Pieces sinks;
  sinks.list.resize(size_t(topology_.num_ranks()));
  char* data = op_.output + first_part(chunk).begin * op_.element_bytes;
  for (const int peer : neighbours()) {
    const int64_t bytes = elements_of(chunk, peer) * op_.element_bytes;
    sinks.list[size_t(peer)] = {.data = data, .bytes = bytes};
    data += bytes;
  }
  const Piece mine = sinks.at(local_.rank());
  exchange_locally({.base = mine.data, .stride = 0, .bytes = mine.bytes, .list = {}, .only = -1}, std::move(sinks));
}

void HostSums::exchange_locally(Pieces offers, Pieces sinks) {
  Op step;
  step.kind = Op::Kind::exchange;
  step.record = op_.record;
  step.timeout = op_.timeout;
  step.offers = std::move(offers);
  step.sinks = std::move(sinks);
  local_.arrive_at_step(step);
  local_.complete_step(step);
}

}  // namespace serried::hierarchical
