// A large reduce or reduce_scatter in the order of ranks, over hosts whose ranks follow each other: what the ranks of
// one host add up goes on to the next, and from the last each part of the result to the host of its owner.
#pragma once

#include "serried/comm/backends/hierarchical/parts.h"
#include "serried/comm/backends/hierarchical/streams.h"

#include <memory>
#include <vector>

namespace serried::hierarchical {

/// One collective of one rank. Additions are those of one host.
class ChainToOwners {
 public:
  ChainToOwners(shm::Engine& local, Links& links, const Topology& topology, const shm::Op& op);

  /// Until `op` is done.
  void run();

 private:
  /// So many chunks after a partial has left, the result is looked for.
  static constexpr int64_t kLag = 4;
  static_assert(kLag < Parts::kMostUnderWay);

  enum class Stage : uint64_t { partials, results };
  struct Flight {
    Streams in, out, results_in;
  };

  bool is_first() const { return parts_.host() == 0; }
  bool is_last() const { return parts_.host() + 1 == topology_.num_hosts(); }
  char* came_at(int64_t chunk) const;
  char* made_at(int64_t chunk) const;
  int64_t lane_elements(int64_t chunk, int lane) const;
  uint64_t tag_of(int lane, Stage stage) const;
  void expect(int64_t chunk);
  void add(int64_t chunk);
  void pass_on(int64_t chunk);
  void send_results(int64_t chunk);
  void expect_results(int64_t chunk);

  Links& links_;
  const Topology& topology_;
  const shm::Op& op_;
  const shm::PartialReduction reduction_;
  Parts parts_;
  std::unique_ptr<char[]> came_;  // rings of chunks
  std::unique_ptr<char[]> made_;
  std::vector<Flight> flights_;
};

}  // namespace serried::hierarchical
