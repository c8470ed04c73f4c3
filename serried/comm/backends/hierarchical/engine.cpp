// The life of the engine, and the course of a collective.
#include "serried/comm/backends/hierarchical/engine.h"

#include <algorithm>

#include "serried/comm/backends/hierarchical/chain.h"

namespace serried::hierarchical {

HierarchicalEngine::HierarchicalEngine(std::unique_ptr<shm::Engine> local, Topology topology, Order order,
                                       std::unique_ptr<net::Wire> wire)
    : local_(std::move(local)),
      topology_(std::move(topology)),
      links_(std::move(wire), local_->segment(), local_->sync(), topology_, local_->rank()),
      mail_(links_, topology_, local_->rank()),
      receivers_(topology_.receivers(rank())),
      tellers_(topology_.tellers(rank())),
      order_(order),
      takes_chain_(fits_chain(topology_)) {
  for (const int peer : tellers_) coming_.emplace_back().peer = peer;
  for (const int peer : receivers_) going_.emplace_back().peer = peer;
  std::vector<int> tellers;
  for (int other = 0; other < world_size(); ++other) {
    tellers.push_back(is_neighbour(other) ? other : topology_.receiver(other, topology_.host_of(rank())));
  }
  sync().set_tellers(std::move(tellers));
  sync().set_background([this] {
    links_.progress();
    const bool all_moved = go_on_with_streams();
    return moves_parts_ || !all_moved ||
           std::any_of(going_.begin(), going_.end(), [](const Post& p) { return !p.transfer.ended(); });
  });
}

HierarchicalEngine::~HierarchicalEngine() {
  end_posts(/*cancel=*/true);
}

void HierarchicalEngine::arrive(Op& op) {
  links_.progress();
  op.record.sequence = sequence() + 1;
  num_steps_ = 0;
  const int64_t bytes = lay_out_arrival(op);
  local_->begin(op);
  post_arrivals(op, bytes);
}

bool HierarchicalEngine::all_have_arrived(const Op& op) {
  links_.progress();
  if (!take_arrivals(op)) return false;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!has_come(peer, op)) return false;
  }
  return true;
}

void HierarchicalEngine::complete(Op& op) {
  try {
    complete_kind(op);
    end_posts(/*cancel=*/false);
  } catch (...) {
    streams_.clear();
    end_posts(/*cancel=*/true);
    sync().give_up(local_->one_process());
    links_.tell_abort();
    throw;
  }
}

void HierarchicalEngine::complete_kind(Op& op) {
  meet(op);
  switch (op.kind) {
    case Op::Kind::all_reduce: return all_reduce(op);
    case Op::Kind::exchange: return exchange(op);
    case Op::Kind::reduce_pieces: return reduce_to_owners(op);
    case Op::Kind::barrier: return;
  }
}

void HierarchicalEngine::abort(const std::string& why, shm::PhaseSync::Cause cause) {
  local_->abort(why, cause);
  links_.tell_abort();
}

void HierarchicalEngine::leave() {
  local_->leave();
  links_.tell_left(sequence());
}

}  // namespace serried::hierarchical
