// One tensor in a row over all lanes, or each rank's piece over the lanes that the rank has.
#include "serried/comm/backends/hierarchical/cut.h"

#include <algorithm>

namespace serried::hierarchical {
namespace {

int64_t divide_up(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

}  // namespace

Cut::Cut(const Topology& topology, const shm::Op& op, int64_t part_elements)
    : topology_(topology),
      unit_(std::max<int64_t>(1, kLine / op.element_bytes)),
      part_elements_(part_elements / unit_ * unit_) {
  const bool is_to_root = op.record.kind == watch::Kind::reduce;
  if (op.kind == shm::Op::Kind::all_reduce || is_to_root) {
    row_piece_ = is_to_root ? op.record.root : 0;
    only_host_ = is_to_root ? topology.host_of(op.record.root) : -1;
    row_elements_ = is_to_root ? op.offers.at(op.record.root).bytes / op.element_bytes : op.count;
    const int64_t num_parts = int64_t(topology.num_lanes()) * (is_to_root ? 1 : topology.num_hosts());
    num_chunks_ = divide_up(row_elements_, num_parts * part_elements_);
    return;
  }
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    pieces_.push_back(op.offers.at(rank).bytes / op.element_bytes);
    const Topology::Lanes lanes = topology.lanes_of(rank);
    const int64_t largest = share(pieces_.back(), lanes.end - lanes.begin, 0).count;
    num_chunks_ = std::max(num_chunks_, divide_up(largest, part_elements_));
  }
}

Cut::Part Cut::share(int64_t count, int num_shares, int index) const {
  const int64_t each = divide_up(divide_up(count, num_shares), unit_) * unit_;
  const int64_t begin = std::min(count, each * index);
  return {.piece = 0, .begin = begin, .count = std::min(each, count - begin)};
}

Cut::Part Cut::part(int64_t chunk, int host, int lane) const {
  return is_in_a_row() ? part_of_row(chunk, host, lane) : part_of_piece(chunk, host, lane);
}

Cut::Part Cut::part_of_row(int64_t chunk, int host, int lane) const {
  if (only_host_ >= 0 && host != only_host_) return {.piece = row_piece_};
  const int num_hosts = only_host_ >= 0 ? 1 : topology_.num_hosts();
  const int num_parts = topology_.num_lanes() * num_hosts;
  const int64_t begin = chunk * num_parts * part_elements_;
  const int64_t count = std::min(num_parts * part_elements_, row_elements_ - begin);
  Part part = share(count, num_parts, lane * num_hosts + (only_host_ >= 0 ? 0 : host));
  part.piece = row_piece_;
  part.begin += begin;
  return part;
}

Cut::Part Cut::part_of_piece(int64_t chunk, int host, int lane) const {
  const int owner = topology_.rank_at(host, lane);
  const Topology::Lanes lanes = topology_.lanes_of(owner);
  Part part = share(pieces_[size_t(owner)], lanes.end - lanes.begin, lane - lanes.begin);
  const int64_t done = std::min(part.count, chunk * part_elements_);
  return {.piece = owner, .begin = part.begin + done, .count = std::min(part_elements_, part.count - done)};
}

}  // namespace serried::hierarchical
