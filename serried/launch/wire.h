// Messages between launchers, and between a launcher and its ranks, over one socket.
// A protocol of our own because the launcher starts without LibTorch, and a socket closes when its host dies.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "serried/base/channel/message.h"
#include "serried/launch/fd.h"
#include "serried/launch/loop.h"

namespace serried::launch {

using channel::decode;
using channel::encode;
using channel::Message;
using channel::number_in;

/// Sends and receives messages without blocking.
class Connection {
 public:
  explicit Connection(Fd socket, size_t most_bytes = channel::kMostBytesOfStrangers);

  /// Queues; what the socket does not take now goes out in later turns.
  void send(const Message& message);

  /// The messages that have come. Closes on the peer's end, an error, or bytes that are no message.
  std::vector<Message> receive();

  bool closed() const { return !socket_; }
  void close() { socket_.reset(); }
  int fd() const { return socket_.get(); }

  /// What poll() should wait for.
  short events() const;
  void flush();

  /// What waits for the peer to read.
  size_t num_unsent() const { return out_.size(); }
  /// What has come, for those who want to know whether the peer lives: a long message takes its time.
  size_t num_received() const { return num_received_; }

 private:
  Fd socket_;
  std::string in_;
  std::string out_;
  size_t most_bytes_;
  size_t num_received_ = 0;
};

}  // namespace serried::launch
