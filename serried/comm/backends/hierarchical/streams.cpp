// Started at once, finished in any order.
#include "serried/comm/backends/hierarchical/streams.h"

#include <algorithm>

namespace serried::hierarchical {

void Streams::start(Links& links, Stream::Direction direction, int peer, uint64_t tag, char* data, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += Stream::kChunkBytes) {
    const int64_t length = std::min(Stream::kChunkBytes, bytes - begin);
    streams_.push_back(std::make_unique<Stream>(links.wire(), direction, peer, tag, data + begin, length));
    streams_.back()->go_on();
  }
}

void Streams::finish(Links& links) {
  const auto have_ended = [&] {
    for (const std::unique_ptr<Stream>& stream : streams_) {
      if (stream->go_on()) continue;
      if (!stream->error().empty()) links.fail_for_lost(stream->peer(), stream->error());
      return false;
    }
    return true;
  };
  if (!have_ended()) links.wait(have_ended, [] {});
  streams_.clear();
}

}  // namespace serried::hierarchical
