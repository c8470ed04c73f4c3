// What a launcher that was started on another host is told, through its stdin.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/loop.h"
#include "serried/launch/options.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// Lines that such a launcher prints before anything else, so that what a login shell may print is not taken for it.
inline constexpr const char* kNodeIsReady = "serried launcher is here: ";  // and its version
inline constexpr const char* kNodeListens = "serried launcher listens: ";  // and its port, if it is node 0

/// The reading end: a pipe, a socket, or whatever ssh gives.
class Control {
 public:
  explicit Control(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  bool ended() const { return ended_; }

  /// Reads once, which blocks unless poll() has reported the descriptor. std::runtime_error if it is no message.
  std::vector<Message> take();

  /// What has been read and not been taken.
  std::vector<Message> rest();

  /// The first message; empty if none comes in time, or the other end closes.
  Message wait(Time deadline);

 private:
  void read_some();

  int fd_;
  std::string in_;
  bool ended_ = false;
};

/// All that one launcher needs: the token too, which so never stands on a command line.
struct NodeSetup {
  Options options;
  std::vector<std::string> environment = {};  // "NAME=value"
};
Message to_message(const NodeSetup& setup);
/// std::runtime_error if it makes no sense.
NodeSetup node_setup_from(const Message& message);

}  // namespace serried::launch
