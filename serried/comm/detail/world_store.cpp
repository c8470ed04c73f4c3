// TCP and file stores with an orderly end: rank 0's server leaves last, quietly, and never hangs.
#include "serried/comm/detail/world_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/detail/host.h"

namespace serried::detail {
namespace {

using std::chrono::milliseconds;

std::string farewell_key(int rank) {
  return c10::str("serried/farewell/", rank);
}

class WorldStore final : public c10d::TCPStore {
 public:
  WorldStore(const TcpPlace& place, const c10d::TCPStoreOptions& options)
      : c10d::TCPStore(place.host, options), place_(place), process_(::getpid()) {}
  ~WorldStore() override { farewell(); }

  void abandon() { abandoned_ = true; }

  void farewell() noexcept {
    if (left_.exchange(true) || abandoned_ || process_ != ::getpid()) return;
    try {
      if (place_.serve) return wait_for_others();
      // c10d prints a stack trace when it writes to a server that is gone, so look first. `set` waits for no answer.
      if (!is_listening(place_.host, getPort(), milliseconds(200))) return;
      set(farewell_key(place_.rank), std::vector<uint8_t>{1});
    } catch (...) {  // a peer that left without a word, or a server that is gone: there is nobody left to tell
    }
  }

 private:
  void wait_for_others() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < place_.world_size; ++rank) {
      if (rank != place_.rank) keys.push_back(farewell_key(rank));
    }
    // At most 31 years: clocks count nanoseconds in 63 bits.
    const std::chrono::seconds patience(
        std::clamp<int64_t>(env::integer("SERRIED_SHUTDOWN_TIMEOUT"), 0, 1'000'000'000));
    const auto deadline = std::chrono::steady_clock::now() + patience;
    // Asked again and again, because c10d prints warnings when a wait ends without success.
    while (!keys.empty() && !check(keys) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  const TcpPlace place_;
  const pid_t process_;  // a forked child has no say
  std::atomic<bool> left_{false};
  std::atomic<bool> abandoned_{false};
};

struct OpenStores {
  std::mutex mutex;
  std::map<std::string, c10::intrusive_ptr<WorldStore>> tcp;
  std::map<std::string, c10::intrusive_ptr<c10d::FileStore>> file;
};

OpenStores& open_stores() {
  static auto* stores = [] {
    std::atexit([] { leave_stores(); });
    return new OpenStores();
  }();
  return *stores;
}

int take_listener(const TcpPlace& place) {
  const int fd = place.listen_fd >= 0 ? place.listen_fd : listen_on(place.port);
  const int error = errno;
  if (fd < 0) {
    raise<c10::DistNetworkError>(
        {"rendezvous", c10::str("rank 0 cannot listen on port ", place.port, ": ", std::strerror(error)),
         error == EADDRINUSE ? "end the program that uses the port, or choose another (MASTER_PORT)"
                             : "choose another port (MASTER_PORT)"});
  }
  if (port_of(fd) != 0 && (place.port == 0 || port_of(fd) == place.port)) return fd;
  raise<c10::ValueError>({"rendezvous",
                          c10::str("SERRIED_MASTER_LISTEN_FD is ", fd, ", which does not listen on port ", place.port),
                          "unset SERRIED_MASTER_LISTEN_FD, or pass a socket that listens on MASTER_PORT"});
}

c10::intrusive_ptr<WorldStore> connect(TcpPlace place, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.isServer = place.serve;
  options.waitWorkers = false;  // groups wait for each other by keys; waiting here too would double the start-up time
  options.useLibUV = place.use_libuv;
  // c10d cuts the time of a connection to whole seconds, and 0 would mean for ever.
  options.timeout = std::chrono::ceil<std::chrono::seconds>(timeout);
  if (place.serve) options.masterListenFd = take_listener(place);
  options.port = place.serve ? port_of(*options.masterListenFd) : place.port;
  if (!place.serve && !wait_for_listener(place.host, place.port, timeout)) {
    raise<c10::DistNetworkError>(
        {"rendezvous", c10::str("nothing listens at ", place.host, ":", place.port, " after ", timeout.count(), " ms"),
         "start rank 0, and check its address and port (MASTER_ADDR, MASTER_PORT) and the firewall"});
  }
  auto store = c10::make_intrusive<WorldStore>(place, options);
  store->setTimeout(timeout);
  return store;
}

// A LibTorch built without libuv says so before it opens anything: then the plain server does.
c10::intrusive_ptr<WorldStore> connect_any(const TcpPlace& place, milliseconds timeout) {
  try {
    return connect(place, timeout);
  } catch (const c10::DistNetworkError&) {
    throw;
  } catch (const c10::Error& error) {
    if (!place.use_libuv || std::strstr(error.what_without_backtrace(), "libuv") == nullptr) throw;
  }
  TcpPlace plain = place;
  plain.use_libuv = false;
  return connect(plain, timeout);
}

void check_writable(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd >= 0) {
    ::close(fd);
    return;
  }
  raise<c10::ValueError>({"rendezvous", c10::str("cannot write file://", path, ": ", std::strerror(errno)),
                          "pass a path in a folder that exists and that all ranks can write"});
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_tcp_store(const TcpPlace& place, milliseconds timeout) {
  const std::string key = c10::str(place.host, ":", place.port, "#", place.rank, place.serve ? "s" : "");
  OpenStores& stores = open_stores();
  {
    std::lock_guard<std::mutex> lock(stores.mutex);
    const auto found = stores.tcp.find(key);
    if (found != stores.tcp.end() && place.port != 0) return found->second;
  }
  // Not under the lock: ranks that are threads of one process wait for each other here.
  c10::intrusive_ptr<WorldStore> store = connect_any(place, timeout);
  std::lock_guard<std::mutex> lock(stores.mutex);
  stores.tcp[c10::str(place.host, ":", store->getPort(), "#", place.rank, place.serve ? "s" : "")] = store;
  return store;
}

c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int rank, int world_size) {
  OpenStores& stores = open_stores();
  std::lock_guard<std::mutex> lock(stores.mutex);
  c10::intrusive_ptr<c10d::FileStore>& store = stores.file[c10::str(path, "#", rank)];
  if (store) return store;
  check_writable(path);
  store = c10::make_intrusive<c10d::FileStore>(path, world_size);
  return store;
}

c10::intrusive_ptr<c10d::Store> without_prefix(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
}

void abandon(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* world = dynamic_cast<WorldStore*>(without_prefix(store).get());
  if (world != nullptr) world->abandon();
}

void leave_stores() noexcept {
  try {
    std::map<std::string, c10::intrusive_ptr<WorldStore>> tcp;
    std::map<std::string, c10::intrusive_ptr<c10d::FileStore>> file;
    {
      std::lock_guard<std::mutex> lock(open_stores().mutex);
      tcp.swap(open_stores().tcp);
      file.swap(open_stores().file);
    }
    // Clients first: a process whose threads are ranks has the server and its clients.
    for (const bool servers : {false, true}) {
      for (const auto& [key, store] : tcp) {
        if (key.ends_with('s') == servers) store->farewell();
      }
    }
  } catch (...) {  // out of memory at exit: nothing to be done
  }
}

}  // namespace serried::detail
