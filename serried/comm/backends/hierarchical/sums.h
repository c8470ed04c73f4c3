// A large reduction by sums of hosts: the ranks of a host add up what they have, hosts exchange the sums lane by lane,
// and the rank that makes the result of a part adds up those of all hosts. As few bytes as can be leave a host.
#pragma once

#include "serried/comm/backends/hierarchical/order.h"
#include "serried/comm/backends/hierarchical/parts.h"
#include "serried/comm/backends/hierarchical/streams.h"

#include <memory>
#include <vector>

namespace serried::hierarchical {

/// One collective of one rank: an all_reduce, reduce or reduce_scatter. Bits are those of the order of hosts; and of
/// that of ranks, where each host has one and `reduction` adds in that order.
class HostSums {
 public:
  HostSums(shm::Engine& local, Links& links, const Topology& topology, const shm::Op& op, OrderedReduction& reduction);

  /// Until `op` is done.
  void run();

 private:
  /// So many chunks after its sums have left, a part is joined, and so many after that the results are spread.
  static constexpr int64_t kLag = 2;

  /// A host may send the sums of that many chunks more than it knows this one to have begun with; where there is no
  /// room for what comes, the engine keeps it, and copies it once more.
  static constexpr int64_t kAhead = kLag + 1;

  enum class Stage : uint64_t { sums, results };
  struct Flight {
    Streams sums_in, sums_out, results_in, results_out;
  };

  char* sums_at(int64_t chunk) const;
  char* came_at(int64_t chunk, int lane, int host) const;
  uint64_t tag_of(int lane, Stage stage) const;
  void expect(int64_t chunk);
  void add(int64_t chunk);
  void send_sums(int64_t chunk);
  void join(int64_t chunk);
  void send_result(int64_t chunk, int lane);

  Links& links_;
  const Topology& topology_;
  const shm::Op& op_;
  OrderedReduction& reduction_;
  Parts parts_;
  const int64_t sum_bytes_;       // of an element
  std::unique_ptr<char[]> sums_;  // rings of chunks
  std::unique_ptr<char[]> came_;
  std::vector<Flight> flights_;
};

}  // namespace serried::hierarchical
