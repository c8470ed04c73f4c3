// Messages between the ranks of a group that are on different hosts: one interface, and an engine of others behind it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace serried::net {

/// A message on its way. Its owner keeps it, and the memory that it names, where they are until it has ended.
struct Transfer {
  enum class State : uint8_t { idle, under_way, done, failed, cancelled };

  State state = State::idle;
  size_t bytes = 0;  // of what has come; a message may be shorter than the memory for it
  int peer = -1;
  void* handle = nullptr;  // the wire's
  std::string error = {};  // why it failed: a lost peer, a message longer than the memory for it

  /// Another thread may end it meanwhile.
  bool ended() const {
    return std::atomic_ref(const_cast<State&>(state)).load(std::memory_order_acquire) != State::under_way;
  }
};

/// The bits of a tag that a caller has: an engine that matches by 64 bits has the peer's rank in the others. A tag that
/// is larger fails its transfer, as does a rank of 65536 or above.
inline constexpr int kTagBits = 48;

/// One rank's end. Messages of one peer and tag come in the order in which they were sent; a receive takes the oldest
/// one of that peer whose tag is equal, also where it came before the receive was posted. Nothing here blocks.
/// Any thread may call; a Transfer belongs to one thread at a time, and ends only in a call of the wire's, so where
/// several threads call, one of them calls `progress` and wakes the others.
///
/// What a peer sent before it was lost is there to be received; then receives from it fail, and sends to it. The
/// destructor lets what has been sent leave, for a second at most, and ends what is under way as failed.
class Wire {
 public:
  virtual ~Wire() = default;

  /// "ucx", "gloo"
  virtual const char* name() const = 0;

  /// Where peers reach this end: bytes, which travel through the store of the group.
  virtual std::string address() const = 0;

  /// Once, before the first message: where each rank of the group is; empty where it is never sent to.
  virtual void connect(std::vector<std::string> addresses) = 0;

  /// Starts a message; it may have ended when this returns. A peer that is lost ends it as failed.
  virtual void send(Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) = 0;
  virtual void receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) = 0;

  /// Lets what is under way go on, and ends what is due; whether anything happened.
  virtual bool progress() = 0;

  /// Readable when `progress` has something to do, once `arm` was called and returned true: false means that there is
  /// something to do already. -1: there is none, look again. One thread sleeps on it.
  virtual int descriptor() const = 0;
  virtual bool arm() = 0;

  /// Ends a transfer as cancelled, or as what it became meanwhile; its memory is free when this returns. A message that
  /// is cut in the middle cannot be taken back alone: it takes all that is under way with that peer along, as
  /// `give_up`.
  virtual void cancel(Transfer& transfer) = 0;

  /// Ends all that is under way to and from a peer, which the launcher or the kernel says is lost, as failed for `why`;
  /// from then on whatever is started with it fails at once, for the same reason.
  virtual void give_up(int peer, const std::string& why) = 0;
};

}  // namespace serried::net
