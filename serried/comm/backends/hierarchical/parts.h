// What the ranks of one host do together with the parts of a large reduction.
#pragma once

#include "serried/comm/backends/hierarchical/cut.h"
#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/engine.h"

#include <memory>
#include <vector>

namespace serried::hierarchical {

/// Of one collective: an all_reduce, reduce or reduce_scatter. Every rank of the host calls the same functions.
class Parts {
 public:
  Parts(shm::Engine& local, const Topology& topology, const shm::Op& op, const shm::PartialReduction& reduction);

  /// Results for the root are kept for so many chunks.
  static constexpr int64_t kMostUnderWay = 5;

  const Cut& cut() const { return cut_; }
  int host() const { return host_; }
  const Topology::Lanes& lanes() const { return lanes_; }  // of this rank
  bool is_all_reduce() const { return op_.kind == shm::Op::Kind::all_reduce; }
  bool is_to_root() const { return op_.record.kind == watch::Kind::reduce; }

  /// The most elements that a rank adds up of a chunk, or makes the result of.
  int64_t most_elements() const;
  int64_t part_elements() const { return part_elements_; }

  /// Adds up what the ranks of this host have of this rank's lanes, lane after lane, of each lane for host after host;
  /// `before` and `num_ranks` as in shm::HostPart.
  void add(int64_t chunk, char* out, const char* before = nullptr, int num_ranks = 0);

  /// Where this rank lays the result of its part of a lane.
  char* result_of(int64_t chunk, int lane) const;

  /// Results of this host's lanes: to the root, or to all ranks of the host.
  void give_to_root(int64_t chunk);
  void spread(int64_t chunk);

 private:
  const std::vector<int>& neighbours() const { return topology_.ranks_of(host_); }
  const char* source_of(const Cut::Part& part) const;
  Cut::Part first_part(int64_t chunk) const;
  int64_t elements_of(int64_t chunk, int rank) const;
  shm::Pieces pieces_of_neighbours(int64_t chunk, char* data) const;
  void add_alone(int64_t chunk, char* out, const char* before, int num_ranks);
  const char* pack(int64_t chunk);
  void exchange(shm::Piece mine, shm::Pieces sinks);
  void run(shm::Op& step);

  shm::Engine& local_;
  const Topology& topology_;
  const shm::Op& op_;
  const shm::PartialReduction reduction_;
  const int host_;
  const Topology::Lanes lanes_;
  const int64_t part_elements_;
  const Cut cut_;
  std::unique_ptr<char[]> packed_;
  std::unique_ptr<char[]> for_root_;  // a ring of chunks
};

}  // namespace serried::hierarchical
