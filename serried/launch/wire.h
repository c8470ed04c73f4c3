// Messages between launchers over one TCP connection.
// A protocol of our own because the launcher starts without LibTorch, and a socket closes when its host dies.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/fd.h"
#include "serried/launch/loop.h"

namespace serried::launch {

/// A verb and its fields; fields may hold any bytes.
using Message = std::vector<std::string>;

std::string encode(const Message& message);

/// Takes the first whole message off the front of `bytes`; empty if there is none yet.
/// std::runtime_error if the bytes are no message: another program speaks.
Message decode(std::string& bytes);

/// A field as std::to_string wrote it; std::runtime_error if it is no such number.
int number_in(const std::string& field);

/// Sends and receives messages without blocking.
class Connection {
 public:
  explicit Connection(Fd socket);

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

 private:
  Fd socket_;
  std::string in_;
  std::string out_;
};

}  // namespace serried::launch
