// Started at once, finished in any order.
#include "serried/comm/backends/hierarchical/streams.h"

namespace serried::hierarchical {

void Streams::start(Links& links, Stream::Direction direction, int peer, uint64_t tag, char* data, int64_t bytes) {
  if (bytes == 0) return;
  streams_.push_back(std::make_unique<Stream>(links.wire(), direction, peer, tag, data, bytes));
  streams_.back()->go_on();
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
