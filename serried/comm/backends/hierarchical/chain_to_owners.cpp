// Chunk after chunk: add what came to what is here, pass it on; a few chunks later the result is here.
#include "serried/comm/backends/hierarchical/chain_to_owners.h"

#include <algorithm>
#include <cstring>

namespace serried::hierarchical {

ChainToOwners::ChainToOwners(shm::Engine& local, Links& links, const Topology& topology, const shm::Op& op)
    : links_(links),
      topology_(topology),
      op_(op),
      reduction_(shm::find_partial_reduction(c10::ScalarType(op.record.dtype),
                                             c10d::ReduceOp::RedOpType(op.record.reduce_op))),
      parts_(local, topology, op, reduction_),
      flights_(size_t(parts_.cut().num_chunks())) {
  const size_t ring = size_t((kLag + 1) * parts_.most_elements() * reduction_.element_bytes);
  if (!is_first()) came_ = std::make_unique_for_overwrite<char[]>(ring);
  made_ = std::make_unique_for_overwrite<char[]>(ring);
}

char* ChainToOwners::came_at(int64_t chunk) const {
  return came_.get() + chunk % (kLag + 1) * parts_.most_elements() * reduction_.element_bytes;
}

char* ChainToOwners::made_at(int64_t chunk) const {
  return made_.get() + chunk % (kLag + 1) * parts_.most_elements() * reduction_.element_bytes;
}

/// Of the parts of all hosts.
int64_t ChainToOwners::lane_elements(int64_t chunk, int lane) const {
  int64_t elements = 0;
  for (int host = 0; host < topology_.num_hosts(); ++host) elements += parts_.cut().part(chunk, host, lane).count;
  return elements;
}

uint64_t ChainToOwners::tag_of(int lane, Stage stage) const {
  return make_tag(Purpose::data, op_.record.sequence, 1 + 2 * uint64_t(lane) + uint64_t(stage));
}

void ChainToOwners::run() {
  const int64_t num_chunks = parts_.cut().num_chunks();
  for (int64_t chunk = 0; chunk < std::min(kLag, num_chunks); ++chunk) expect(chunk);
  for (int64_t chunk = 0; chunk < num_chunks + kLag; ++chunk) {
    if (chunk + kLag < num_chunks) expect(chunk + kLag);
    if (chunk < num_chunks) {
      add(chunk);
      pass_on(chunk);
    }
    if (chunk < kLag) continue;
    flights_[size_t(chunk - kLag)].results_in.finish(links_);
    if (parts_.is_to_root()) parts_.give_to_root(chunk - kLag);
  }
  for (Flight& flight : flights_) flight.out.finish(links_);
}

/// Makes room for what the host before will send.
void ChainToOwners::expect(int64_t chunk) {
  if (is_first()) return;
  char* to = came_at(chunk);
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    const int64_t bytes = lane_elements(chunk, lane) * reduction_.element_bytes;
    flights_[size_t(chunk)].in.start(links_, Stream::Direction::receive, topology_.rank_at(parts_.host() - 1, lane),
                                     tag_of(lane, Stage::partials), to, bytes);
    to += bytes;
  }
}

void ChainToOwners::add(int64_t chunk) {
  if (chunk > kLag) flights_[size_t(chunk - kLag - 1)].out.finish(links_);  // of the memory that is used now
  flights_[size_t(chunk)].in.finish(links_);
  parts_.add(chunk, made_at(chunk), is_first() ? nullptr : came_at(chunk), is_last() ? topology_.num_ranks() : 0);
}

void ChainToOwners::pass_on(int64_t chunk) {
  if (is_last()) return send_results(chunk);
  const char* from = made_at(chunk);
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    const int64_t bytes = lane_elements(chunk, lane) * reduction_.element_bytes;
    flights_[size_t(chunk)].out.start(links_, Stream::Direction::send, topology_.rank_at(parts_.host() + 1, lane),
                                      tag_of(lane, Stage::partials), const_cast<char*>(from), bytes);
    from += bytes;
  }
  expect_results(chunk);
}

void ChainToOwners::expect_results(int64_t chunk) {
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    const int64_t bytes = parts_.cut().part(chunk, parts_.host(), lane).count * op_.element_bytes;
    flights_[size_t(chunk)].results_in.start(links_, Stream::Direction::receive,
                                             topology_.rank_at(topology_.num_hosts() - 1, lane),
                                             tag_of(lane, Stage::results), parts_.result_of(chunk, lane), bytes);
  }
}

void ChainToOwners::send_results(int64_t chunk) {
  char* from = made_at(chunk);
  for (int lane = parts_.lanes().begin; lane < parts_.lanes().end; ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      const int64_t bytes = parts_.cut().part(chunk, host, lane).count * op_.element_bytes;
      if (host != parts_.host()) {
        flights_[size_t(chunk)].out.start(links_, Stream::Direction::send, topology_.rank_at(host, lane),
                                          tag_of(lane, Stage::results), from, bytes);
      } else if (bytes > 0) {
        std::memcpy(parts_.result_of(chunk, lane), from, size_t(bytes));
      }
      from += bytes;
    }
  }
}

}  // namespace serried::hierarchical
