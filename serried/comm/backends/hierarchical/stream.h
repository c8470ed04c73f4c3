// Many bytes to or from one peer of another host, in chunks.
#pragma once

#include "serried/comm/net/wire.h"

#include <array>
#include <cstdint>

namespace serried::hierarchical {

/// Its memory may be used again once it is done, or gone: then what was under way is cancelled. A sender is done when
/// the receiver says that it has all: an engine may keep the end of what it has taken until somebody calls it again,
/// and who goes on to compute does not.
class Stream {
 public:
  enum class Direction { send, receive };

  /// The most that one message has.
  static constexpr int64_t kChunkBytes = 256 << 10;

  /// Starts nothing yet. The peer has a stream of the other direction with the same tag and as many bytes.
  Stream(net::Wire& wire, Direction direction, int peer, uint64_t tag, char* data, int64_t bytes);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Starts what may be under way, and whether all of it has ended well.
  bool go_on();

  /// How many bytes from the first on have come, or left.
  int64_t bytes_done() const { return done_; }

  /// Why it cannot be done; empty while it can.
  const std::string& error() const { return error_; }
  int peer() const { return peer_; }

 private:
  /// Few enough that a receiver without memory of its own never has to keep more of a peer's.
  static constexpr int kUnderWay = 2;

  int64_t length_at(int64_t begin) const;
  void start_next();
  void end_oldest();
  void begin_receipt();
  bool receipt_is_through();

  net::Wire& wire_;
  const Direction direction_;
  const int peer_;
  const uint64_t tag_;
  char* const data_;
  const int64_t bytes_;
  std::array<net::Transfer, kUnderWay> chunks_;
  int64_t started_ = 0;  // bytes
  int64_t done_ = 0;
  bool has_receipt_ = false;
  char receipt_ = 0;
  net::Transfer receipt_transfer_;
  std::string error_;
};

}  // namespace serried::hierarchical
