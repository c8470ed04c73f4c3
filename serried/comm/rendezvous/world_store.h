// The stores that rendezvous hands out: one per place and rank, kept until the process ends, left in good order.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "serried/base/error.h"

namespace serried::detail {

struct TcpPlace {
  std::string host;
  uint16_t port = 0;
  int rank = 0;
  int world_size = 1;
  bool serve = false;  // this process runs the server
  int listen_fd = -1;  // a socket that already listens on `port`, taken over; -1: none
  bool use_libuv = true;
  bool several_hosts = false;  // ranks of other machines are known to come
};

/// The store at `place`, signed if the job has a secret; the same one for the same address and rank while the process
/// lives: a later group of another rank may come to the old server at any time. DistNetworkError that says the address
/// where it is not reachable or taken.
c10::intrusive_ptr<c10d::Store> open_tcp_store(const TcpPlace& place, std::chrono::milliseconds timeout);

/// The store that serried run keeps for this process, signed if the job has a secret; null where it was started by
/// something else. Ranks that took other ports meet apart, as at a port, and so do ranks that began in other
/// generations.
c10::intrusive_ptr<c10d::Store> open_launcher_store(const std::string& master_addr, uint16_t master_port,
                                                    std::chrono::milliseconds timeout);

/// The part of it in which the ranks of `generation` meet, signed if the job has a secret; null where it was started by
/// something else. Where a later table of ranks counts, what is asked of it raises DistStoreError.
c10::intrusive_ptr<c10d::Store> open_generation_store(int generation, std::chrono::milliseconds timeout);

/// The store in the file at `path`, shared in the same way. The last rank to leave removes the file.
c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int rank, int world_size);

/// A peer may be dead: rank 0 waits for farewells at exit only half a second. `store` may be prefixed.
void abandon(const c10::intrusive_ptr<c10d::Store>& store);

/// Says farewell on every store that was opened and forgets them; runs by itself at exit. A server waits until all
/// other ranks have left, at most SERRIED_SHUTDOWN_TIMEOUT seconds. Never throws.
void leave_stores() noexcept;

/// "serried run", "127.0.0.1:29500" or "file:///tmp/meet", for messages; "" for a store that rendezvous did not make.
std::string place_of(const c10::intrusive_ptr<c10d::Store>& store);

/// The address of this machine from which it reaches `store`; "" for one of which that is not known.
std::string address_towards_store(const c10::intrusive_ptr<c10d::Store>& store);

/// The store under all prefixes and signatures.
c10::intrusive_ptr<c10d::Store> innermost_store(const c10::intrusive_ptr<c10d::Store>& store);

/// What `fn` gives, which talks to the store where ranks meet on behalf of the call `where`; where that is gone, an
/// error that says so, since c10d's say neither call nor rank.
template <class Fn>
auto through_store(std::string_view where, Fn&& fn) {
  try {
    return fn();
  } catch (const c10::DistNetworkError& error) {
    const std::string& text = error.msg();
    if (text.starts_with('[')) throw;  // one of ours
    raise<c10::DistNetworkError>(
        {where, c10::str("the store where the ranks meet is gone: ", text.substr(0, text.find('\n'))),
         "look at why the rank that serves it, rank 0 unless you made the store, has ended; then start the job again"});
  }
}

}  // namespace serried::detail
