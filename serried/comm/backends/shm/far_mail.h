// Messages from one rank to another, and the way that they take to ranks of other hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace serried::shm {

/// One send or receive. Fields below `what` belong to the mailbox until it is done.
struct Transfer {
  enum class Direction { send, receive };

  Direction direction = Direction::send;
  char* data = nullptr;
  int64_t bytes = 0;
  int peer = 0;  // -1: receive from anybody
  int tag = 0;
  int dtype = 0;
  std::chrono::milliseconds timeout{};
  std::string what;                                  // for messages: "recv f32[4] from rank 2, tag 0"
  std::function<void(std::exception_ptr)> finished;  // called once, without the mailbox's lock

  int source = -1;
  int64_t moved = 0;
  bool header_sent = false;
  bool done = false;
  std::exception_ptr error;
};

/// What goes ahead of the bytes of a message.
struct MessageHeader {
  int64_t bytes;
  int32_t tag;
  int32_t dtype;
};

/// One stream of messages in each direction for each rank of another host, for the mailbox, whose lock is held.
/// Nothing blocks.
class FarMail {
 public:
  virtual ~FarMail() = default;

  virtual bool reaches(int peer) const = 0;

  /// Goes on with the message that was begun last, or begins it; whether all of it has left.
  virtual bool push(Transfer& transfer) = 0;

  /// The next message of `source`, once it is there: until it has been pulled, the same one.
  virtual std::optional<MessageHeader> next(int source) = 0;

  /// Whether all of it has come to `to`.
  virtual bool pull(int source, char* to) = 0;

  /// Why nothing goes to the peer, or comes from it, any more; empty while it does.
  virtual std::string loss(int peer) const = 0;

  /// Ends what is under way: its memory is free when this returns.
  virtual void stop() = 0;

  /// Lets messages go on. Needs no lock.
  virtual void progress() = 0;

  /// Sleeps until something comes from another host. Needs no lock.
  virtual void sleep(std::chrono::milliseconds longest) = 0;
};

}  // namespace serried::shm
