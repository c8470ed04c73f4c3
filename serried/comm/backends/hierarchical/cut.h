// How a large reduction is cut: into chunks, one after the other, and each of them into parts, one for each lane of
// each host. The rank there makes the result of that part.
#pragma once

#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/runner.h"

#include <vector>

namespace serried::hierarchical {

/// Parts begin at cache lines, so that ranks do not write to one.
inline constexpr int64_t kLine = 64;

class Cut {
 public:
  /// No part has more than `part_elements`.
  Cut(const Topology& topology, const shm::Op& op, int64_t part_elements);

  struct Part {
    int piece = 0;      // whose: of an all_reduce there is one piece, 0
    int64_t begin = 0;  // elements, in the piece
    int64_t count = 0;
  };
  Part part(int64_t chunk, int host, int lane) const;

  int64_t num_chunks() const { return num_chunks_; }

  /// Whether the parts of a chunk lie next to each other: lane after lane, of each lane host after host.
  bool is_in_a_row() const { return pieces_.empty(); }

 private:
  Part part_of_row(int64_t chunk, int host, int lane) const;
  Part part_of_piece(int64_t chunk, int host, int lane) const;
  Part share(int64_t count, int num_shares, int index) const;

  const Topology& topology_;
  const int64_t unit_;  // elements of a cache line
  const int64_t part_elements_;
  int only_host_ = -1;  // whose ranks make all of it; -1: all hosts
  int row_piece_ = 0;
  int64_t row_elements_ = 0;
  std::vector<int64_t> pieces_;  // elements of each rank's piece
  int64_t num_chunks_ = 0;
};

}  // namespace serried::hierarchical
