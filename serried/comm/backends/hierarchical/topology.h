// Which ranks share a host, and who of a host tells whom of another.
#pragma once

#include <string>
#include <vector>

namespace serried::hierarchical {

/// The same on every rank. Hosts are in the order of their lowest ranks, ranks of a host ascend; neither hosts of
/// different sizes nor ranks of hosts that interleave are special.
class Topology {
 public:
  /// Ranks with equal names share a host.
  explicit Topology(const std::vector<std::string>& host_of_rank);

  int num_ranks() const { return int(host_of_.size()); }
  int num_hosts() const { return int(hosts_.size()); }
  const std::vector<int>& ranks_of(int host) const { return hosts_[size_t(host)]; }
  int host_of(int rank) const { return host_of_[size_t(rank)]; }
  const std::vector<int>& neighbours(int rank) const { return ranks_of(host_of(rank)); }

  /// Ranks of different hosts work on one thing side by side: on as many lanes as the largest host has ranks. A rank of
  /// a smaller host has several, next to each other.
  int num_lanes() const;
  int rank_at(int host, int lane) const;

  struct Lanes {
    int begin = 0;
    int end = 0;
  };
  Lanes lanes_of(int rank) const;

  /// The rank of `host` that takes what `rank` of another one tells that host.
  int receiver(int rank, int host) const;

  /// Its receivers on all other hosts, and those ranks of other hosts whose receiver it is; both ascend.
  std::vector<int> receivers(int rank) const;
  std::vector<int> tellers(int rank) const;

  /// Runs of consecutive ranks of one host, as they follow each other in the order of ranks.
  struct Run {
    int host = 0;
    int begin = 0;
    int end = 0;
  };
  std::vector<Run> runs() const;

  /// "ranks 0, 1 | rank 2"
  std::string text() const;

 private:
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;
  std::vector<int> place_of_;  // of a rank in its host
};

}  // namespace serried::hierarchical
