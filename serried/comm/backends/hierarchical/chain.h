// An all_reduce of many bytes over hosts whose ranks follow each other: what the ranks of one host add up goes on to
// the next, and the result comes back.
#pragma once

#include "serried/comm/backends/hierarchical/cut.h"
#include "serried/comm/backends/hierarchical/links.h"
#include "serried/comm/backends/hierarchical/stream.h"
#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/engine.h"

#include <memory>
#include <vector>

namespace serried::hierarchical {

/// Whether the chain takes as few bytes out of a host as anything in the order of ranks: where a host has several,
/// which add up before they send. Hosts whose ranks interleave have no such order.
bool fits_chain(const Topology& topology);

/// One all_reduce of one rank. Additions are those of one host: ((x0 + x1) + x2) + ..., kept in the type in which its
/// kernels keep them. Of each chunk a part goes by each lane, which is a rank of every host.
class Chain {
 public:
  Chain(shm::Engine& local, Links& links, const Topology& topology, const shm::Op& op);

  /// Until `op` is done.
  void run();

 private:
  /// How many chunks are under way at once: so many the next host keeps that has not asked for them yet.
  static constexpr int64_t kAhead = 4;
  static constexpr int64_t kPartBytes = 128 << 10;  // of a lane in a chunk, as it goes on

  struct Part {
    int64_t begin = 0;  // elements
    int64_t count = 0;
  };
  using Streams = std::vector<std::unique_ptr<Stream>>;

  bool is_first() const { return host_ == 0; }
  bool is_last() const { return host_ + 1 == topology_.num_hosts(); }
  bool has_lane() const { return lane_ < num_lanes_; }
  Part part_of(int64_t chunk, int lane) const;
  int peer_at(int host) const { return topology_.ranks_of(host)[size_t(lane_)]; }
  char* partial(const std::unique_ptr<char[]>& ring, int64_t chunk) const;
  std::unique_ptr<Stream> start(Stream::Direction direction, int host, char* data, int64_t bytes);
  void finish(std::unique_ptr<Stream>& stream);
  void expect(int64_t chunk);
  void add(int64_t chunk);
  void pass_on(int64_t chunk);
  void spread(int64_t chunk);

  shm::Engine& local_;
  Links& links_;
  const Topology& topology_;
  const shm::Op& op_;
  const shm::PartialReduction reduction_;
  const int host_;
  const int lane_;
  const int num_lanes_;
  const int64_t part_elements_;
  const int64_t num_chunks_;
  std::unique_ptr<char[]> came_;  // rings of parts
  std::unique_ptr<char[]> made_;
  Streams partials_in_, partials_out_, results_in_, results_out_;
};

}  // namespace serried::hierarchical
