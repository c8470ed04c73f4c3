// A large reduction by sums of hosts: the ranks of a host add up what they have, hosts exchange the sums lane by lane,
// and the rank that makes the result of a part adds up those of all hosts. As few bytes as can be leave a host.
#pragma once

#include "serried/comm/backends/hierarchical/cut.h"
#include "serried/comm/backends/hierarchical/links.h"
#include "serried/comm/backends/hierarchical/order.h"
#include "serried/comm/backends/hierarchical/stream.h"
#include "serried/comm/backends/shm/engine.h"

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

  using Streams = std::vector<std::unique_ptr<Stream>>;
  struct Flight {
    Streams sums_in, sums_out, results_in, results_out;
  };
  enum class Stage : uint64_t { sums, results };

  bool is_all_reduce() const { return op_.kind == shm::Op::Kind::all_reduce; }
  bool is_to_root() const { return op_.record.kind == watch::Kind::reduce; }
  const std::vector<int>& neighbours() const { return topology_.ranks_of(host_); }
  const char* source_of(const Cut::Part& part) const;
  Cut::Part first_part(int64_t chunk) const;
  char* result_of(int64_t chunk, int lane) const;
  char* sums_at(int64_t chunk) const;
  char* came_at(int64_t chunk, int lane, int host) const;
  int64_t elements_of(int64_t chunk, int rank) const;
  void start(Streams& streams, Stream::Direction direction, int peer, Stage stage, int lane, char* data, int64_t bytes);
  void finish(Streams& streams);

  void expect(int64_t chunk);
  void add(int64_t chunk);
  void add_with_neighbours(int64_t chunk);
  const char* pack(int64_t chunk);
  void send_sums(int64_t chunk);
  void join(int64_t chunk);
  void give_to_root(int64_t chunk);
  void spread(int64_t chunk);
  void exchange_locally(shm::Pieces offers, shm::Pieces sinks);

  shm::Engine& local_;
  Links& links_;
  const Topology& topology_;
  const shm::Op& op_;
  OrderedReduction& reduction_;
  const int host_;
  const Topology::Lanes lanes_;
  const int64_t part_elements_;
  const Cut cut_;
  std::unique_ptr<char[]> packed_;
  std::unique_ptr<char[]> sums_;  // rings of chunks
  std::unique_ptr<char[]> came_;
  std::unique_ptr<char[]> for_root_;  // of one chunk
  std::vector<Flight> flights_;
};

}  // namespace serried::hierarchical
