// Streams that are waited for together.
#pragma once

#include "serried/comm/backends/hierarchical/links.h"
#include "serried/comm/backends/hierarchical/stream.h"

#include <memory>
#include <vector>

namespace serried::hierarchical {

/// Each of one message: nothing starts a second one while this rank is busy elsewhere, and until then the messages of
/// streams that start later, with the same tag, would be taken for it.
class Streams {
 public:
  /// Of nothing there is no stream; of more bytes than a message has, several.
  void start(Links& links, Stream::Direction direction, int peer, uint64_t tag, char* data, int64_t bytes);

  /// Until all have ended.
  void finish(Links& links);

 private:
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace serried::hierarchical
