// How ranks of one host come to share a segment.
#pragma once

#include "serried/comm/backends/shm/engine.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace serried::shm {

/// What a rank tells the others before they share memory.
struct Greeting {
  detail::SharedFilePlace memory;  // of the segment; fd -1 where the rank has none
  int64_t heap_bytes = 0;          // per rank
  int64_t round_bytes = 0;         // see SegmentShape
  std::string host;

  /// The numbers and the host, separated by spaces.
  std::string text() const;
  bool operator==(const Greeting&) const = default;
};

/// Heaps above this are a mistake: 16 TiB per rank, and sums of 512 of them fit in 63 bits.
inline constexpr int64_t kMaxHeapBytes = int64_t(1) << 44;

/// What `Greeting::text` of rank `rank` gave; DistBackendError for anything else, so that what strangers write is told
/// from a rank. `where` is the backend.
Greeting parse_greeting(std::string_view where, int rank, const std::string& text);

struct ConnectArgs;

/// What went wrong in `fn`, for a rank that tells the others before it raises; empty if nothing did.
template <class Fn>
std::string failure_of(const Fn& fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return "";
}

/// An engine whose peers are all there. Every rank calls it; if one cannot take part, all raise and say which and why.
std::unique_ptr<Runner> connect(const ConnectArgs& args);

struct ConnectArgs {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
  int64_t heap_bytes = 0;
  bool always_stage = false;    // take the way of processes even between threads
  bool one_process = false;     // the ranks must be threads of this process
  std::string backend = "shm";  // for messages
  /// Makes the engine of the group, and of those that it is split into.
  std::function<std::unique_ptr<Runner>(const ConnectArgs&)> connect = shm::connect;
};

}  // namespace serried::shm
