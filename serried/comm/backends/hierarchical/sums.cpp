// Chunk after chunk, in stages: sums leave; some chunks later those of others are joined and results leave; some chunks
// later results are spread.
#include "serried/comm/backends/hierarchical/sums.h"

#include <algorithm>

namespace serried::hierarchical {

HostSums::HostSums(shm::Engine& local, Links& links, const Topology& topology, const shm::Op& op,
                   OrderedReduction& reduction)
    : links_(links),
      topology_(topology),
      op_(op),
      reduction_(reduction),
      parts_(local, topology, op, reduction.part()),
      sum_bytes_(reduction.part().element_bytes),
      flights_(size_t(parts_.cut().num_chunks())) {
  const size_t chunk_bytes = size_t(parts_.most_elements() * sum_bytes_);
  sums_ = std::make_unique_for_overwrite<char[]>((kLag + 1) * chunk_bytes);
  came_ = std::make_unique_for_overwrite<char[]>((kLag + kAhead + 1) * chunk_bytes);
}

char* HostSums::sums_at(int64_t chunk) const {
  return sums_.get() + chunk % (kLag + 1) * parts_.most_elements() * sum_bytes_;
}

char* HostSums::came_at(int64_t chunk, int lane, int host) const {
  const int64_t first = chunk % (kLag + kAhead + 1) * parts_.most_elements();
  const int64_t index = int64_t(lane - parts_.lanes().begin) * topology_.num_hosts() + host;
  return came_.get() + (first + index * parts_.part_elements()) * sum_bytes_;
}

uint64_t HostSums::tag_of(int lane, Stage stage) const {
  return make_tag(Purpose::data, op_.record.sequence, 1 + 2 * uint64_t(lane) + uint64_t(stage));
}

void HostSums::run() {
  const int64_t num_chunks = parts_.cut().num_chunks();
  for (int64_t chunk = 0; chunk < std::min(kAhead, num_chunks); ++chunk) expect(chunk);
  for (int64_t chunk = 0; chunk < num_chunks + 2 * kLag; ++chunk) {
    if (chunk + kAhead < num_chunks) expect(chunk + kAhead);
    if (chunk < num_chunks) add(chunk);
    if (chunk >= kLag && chunk - kLag < num_chunks) join(chunk - kLag);
    if (chunk < 2 * kLag || !parts_.is_all_reduce()) continue;
    flights_[size_t(chunk - 2 * kLag)].results_in.finish(links_);
    parts_.spread(chunk - 2 * kLag);
  }
  for (Flight& flight : flights_) {
    flight.sums_out.finish(links_);
    flight.results_out.finish(links_);
  }
}

/// Makes room for what other hosts will send.
void HostSums::expect(int64_t chunk) {
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    const int64_t bytes = parts_.cut().part(chunk, parts_.host(), lane).count * sum_bytes_;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      if (host == parts_.host()) continue;
      flights_[size_t(chunk)].sums_in.start(links_, Stream::Direction::receive, topology_.rank_at(host, lane),
                                            tag_of(lane, Stage::sums), came_at(chunk, lane, host), bytes);
    }
  }
}

void HostSums::add(int64_t chunk) {
  if (chunk > kLag) flights_[size_t(chunk - kLag - 1)].sums_out.finish(links_);  // of the memory that is used now
  parts_.add(chunk, sums_at(chunk));
  send_sums(chunk);
}

void HostSums::send_sums(int64_t chunk) {
  Flight& flight = flights_[size_t(chunk)];
  char* sums = sums_at(chunk);
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const Cut::Part part = parts_.cut().part(chunk, host, lane);
      char* const out = sums;
      sums += part.count * sum_bytes_;
      if (host == parts_.host()) continue;
      const int peer = topology_.rank_at(host, lane);
      flight.sums_out.start(links_, Stream::Direction::send, peer, tag_of(lane, Stage::sums), out,
                            part.count * sum_bytes_);
      if (!parts_.is_all_reduce()) continue;
      flight.results_in.start(links_, Stream::Direction::receive, peer, tag_of(lane, Stage::results),
                              op_.output + part.begin * op_.element_bytes, part.count * op_.element_bytes);
    }
  }
}

/// Makes the results of this rank's parts.
void HostSums::join(int64_t chunk) {
  flights_[size_t(chunk)].sums_in.finish(links_);
  const char* own = sums_at(chunk);
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    std::vector<const char*> sums;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      sums.push_back(host == parts_.host() ? own : came_at(chunk, lane, host));
      own += parts_.cut().part(chunk, host, lane).count * sum_bytes_;
    }
    reduction_.join(parts_.result_of(chunk, lane), sums, parts_.cut().part(chunk, parts_.host(), lane).count);
    if (parts_.is_all_reduce()) send_result(chunk, lane);
  }
  if (parts_.is_to_root()) parts_.give_to_root(chunk);
}

void HostSums::send_result(int64_t chunk, int lane) {
  const int64_t bytes = parts_.cut().part(chunk, parts_.host(), lane).count * op_.element_bytes;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == parts_.host()) continue;
    flights_[size_t(chunk)].results_out.start(links_, Stream::Direction::send, topology_.rank_at(host, lane),
                                              tag_of(lane, Stage::results), parts_.result_of(chunk, lane), bytes);
  }
}

}  // namespace serried::hierarchical
