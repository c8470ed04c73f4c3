// A large broadcast over more than two hosts: one rank of each passes on to the next host what has come, chunk after
// chunk, so that it leaves every host once at most.
#include <algorithm>

#include "serried/comm/backends/hierarchical/engine.h"
#include "serried/comm/backends/hierarchical/moves_parts.h"
#include "serried/comm/backends/hierarchical/streams.h"

namespace serried::hierarchical {
namespace {

// Of one message, and how many of them may be on their way to the next host.
constexpr int64_t kPassedOnBytes = 128 << 10;
constexpr int64_t kPassedOnAhead = 4;

}  // namespace

/// The root, and the rank that takes part of each other host, in the order in which they pass on.
std::vector<int> HierarchicalEngine::line_from(int root) const {
  std::vector<int> line{root};
  for (int step = 1; step < topology_.num_hosts(); ++step) {
    line.push_back(topology_.receiver(root, (topology_.host_of(root) + step) % topology_.num_hosts()));
  }
  return line;
}

void HierarchicalEngine::pass_down_the_line(const Op& op, Piece whole) {
  const std::vector<int> line = line_from(op.record.root);
  const auto me = std::find(line.begin(), line.end(), rank());
  if (me == line.end()) return;
  const MovesParts moves(moves_parts_);
  const uint64_t tag = make_tag(Purpose::data, sequence(), num_steps_);
  const int64_t num_chunks = (whole.bytes + kPassedOnBytes - 1) / kPassedOnBytes;
  std::vector<Streams> in(static_cast<size_t>(num_chunks)), out(static_cast<size_t>(num_chunks));
  const auto start = [&](std::vector<Streams>& streams, Stream::Direction direction, int peer, int64_t chunk) {
    const int64_t begin = chunk * kPassedOnBytes;
    streams[size_t(chunk)].start(links_, direction, peer, tag, whole.data + begin,
                                 std::min(kPassedOnBytes, whole.bytes - begin));
  };
  const auto expect = [&](int64_t chunk) {
    if (me != line.begin() && chunk < num_chunks) start(in, Stream::Direction::receive, *(me - 1), chunk);
  };
  for (int64_t chunk = 0; chunk < kPassedOnAhead; ++chunk) expect(chunk);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    expect(chunk + kPassedOnAhead);
    in[size_t(chunk)].finish(links_);
    if (chunk >= kPassedOnAhead) out[size_t(chunk - kPassedOnAhead)].finish(links_);
    if (me + 1 != line.end()) start(out, Stream::Direction::send, *(me + 1), chunk);
  }
  for (Streams& streams : out) streams.finish(links_);
}

}  // namespace serried::hierarchical
