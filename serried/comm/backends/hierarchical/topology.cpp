// A table of ranks, by host and by rank.
#include "serried/comm/backends/hierarchical/topology.h"

#include <algorithm>
#include <map>

#include "serried/comm/agree/rank_texts.h"

namespace serried::hierarchical {

Topology::Topology(const std::vector<std::string>& host_of_rank) {
  std::map<std::string, int> numbers;
  for (const std::string& name : host_of_rank) {
    const int rank = int(host_of_.size());
    const int host = numbers.emplace(name, num_hosts()).first->second;
    if (host == num_hosts()) hosts_.emplace_back();
    std::vector<int>& ranks = hosts_[size_t(host)];
    host_of_.push_back(host);
    place_of_.push_back(int(ranks.size()));
    ranks.push_back(rank);
  }
}

int Topology::num_lanes() const {
  size_t most = 0;
  for (const std::vector<int>& ranks : hosts_) most = std::max(most, ranks.size());
  return int(most);
}

int Topology::rank_at(int host, int lane) const {
  const std::vector<int>& ranks = ranks_of(host);
  return ranks[size_t(lane) * ranks.size() / size_t(num_lanes())];
}

Topology::Lanes Topology::lanes_of(int rank) const {
  // The first lane whose place, rounded down, is that of the rank or beyond.
  const int size = int(neighbours(rank).size()), lanes = num_lanes(), place = place_of_[size_t(rank)];
  return {.begin = (place * lanes + size - 1) / size, .end = ((place + 1) * lanes + size - 1) / size};
}

int Topology::receiver(int rank, int host) const {
  const std::vector<int>& ranks = ranks_of(host);
  return ranks[size_t(place_of_[size_t(rank)]) % ranks.size()];
}

std::vector<int> Topology::receivers(int rank) const {
  std::vector<int> all;
  for (int host = 0; host < num_hosts(); ++host) {
    if (host != host_of(rank)) all.push_back(receiver(rank, host));
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<int> Topology::tellers(int rank) const {
  std::vector<int> all;
  for (int other = 0; other < num_ranks(); ++other) {
    if (host_of(other) != host_of(rank) && receiver(other, host_of(rank)) == rank) all.push_back(other);
  }
  return all;
}

std::vector<Topology::Run> Topology::runs() const {
  std::vector<Run> all;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (all.empty() || all.back().host != host_of(rank)) all.push_back({host_of(rank), rank, rank});
    all.back().end = rank + 1;
  }
  return all;
}

std::string Topology::text() const {
  std::string text;
  for (const std::vector<int>& ranks : hosts_) text += (text.empty() ? "" : " | ") + detail::rank_list(ranks);
  return text;
}

}  // namespace serried::hierarchical
