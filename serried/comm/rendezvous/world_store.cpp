// TCP and file stores with an orderly end: rank 0's server leaves last, quietly, and never hangs.
#include "serried/comm/rendezvous/world_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Flags.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/fork.h"
#include "serried/base/listen.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/rendezvous/launcher_store.h"
#include "serried/comm/rendezvous/signed_store.h"

C10_DECLARE_int(caffe2_log_level);

namespace serried::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long rank 0 waits for farewells where some may never come: others learn of the loss a moment later, and still
// look into the store for who is missing.
constexpr milliseconds kHurry(500);

// c10d looks up the name of whom it connects to, and warns where no name server knows it, which is no harm. What goes
// wrong is in the error. The level is one number of the process, so only the first who raises it takes it back.
class WithoutWarnings {
 public:
  WithoutWarnings() {
    const std::lock_guard<std::mutex> lock(mutex());
    if (count()++ == 0) before() = std::exchange(FLAGS_caffe2_log_level, std::max(FLAGS_caffe2_log_level, kErrors));
  }
  ~WithoutWarnings() {
    const std::lock_guard<std::mutex> lock(mutex());
    if (--count() == 0) FLAGS_caffe2_log_level = before();
  }
  WithoutWarnings(const WithoutWarnings&) = delete;
  WithoutWarnings& operator=(const WithoutWarnings&) = delete;

 private:
  static constexpr int kErrors = 2;
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static int& count() {
    static int number = 0;
    return number;
  }
  static int& before() {
    static int level = 0;
    return level;
  }
};

std::string farewell_key(int rank) {
  return c10::str("serried/farewell/", rank);
}

class WorldStore final : public c10d::TCPStore {
 public:
  /// `address` is where `place.host` was found.
  WorldStore(const TcpPlace& place, const std::string& address, const c10d::TCPStoreOptions& options)
      : c10d::TCPStore(address, options), place_(place), signer_(job_signer()) {}
  ~WorldStore() override { farewell(); }

  std::string place_text() const { return c10::str(place_.host, ":", getPort()); }

  void abandon() { abandoned_ = true; }

  void farewell() noexcept {
    if (left_.exchange(true) || !home_.is_here()) return;
    try {
      if (place_.serve) return wait_for_others();
      // c10d prints a stack trace when it writes to a server that is gone, so look first. `set` waits for no answer.
      if (!is_listening(getHost(), getPort(), milliseconds(200))) return;
      const std::string key = farewell_key(place_.rank);
      set(key, signer_ ? signer_->seal(key, {1}) : Bytes{1});
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
    const auto deadline = Clock::now() + (abandoned_ ? std::min<milliseconds>(patience, kHurry) : patience);
    // Asked again and again, because c10d prints warnings when a wait ends without success.
    while (!have_left(keys) && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  // A stranger's farewell is none: the rank it names is still there.
  bool have_left(const std::vector<std::string>& keys) {
    if (keys.empty()) return true;
    if (!check(keys)) return false;
    return !signer_ || std::all_of(keys.begin(), keys.end(),
                                   [&](const std::string& key) { return signer_->open(key, get(key)).has_value(); });
  }

  const TcpPlace place_;
  const std::shared_ptr<const Signer> signer_;
  const HomeProcess home_;  // a forked child has no say
  std::atomic<bool> left_{false};
  std::atomic<bool> abandoned_{false};
};

/// A forked child can use no store of its parent, nor destroy it: its threads, its sockets and its count of ranks are
/// the parent's.
template <class T>
struct Open {
  HomeProcess home;
  c10::intrusive_ptr<T> store;

  explicit Open(c10::intrusive_ptr<T> opened) : store(std::move(opened)) {}
  Open(Open&&) noexcept = default;
  Open& operator=(Open&&) noexcept = default;
  ~Open() {
    if (!home.is_here()) store.release();
  }

  const c10::intrusive_ptr<T>& get() const {
    home.require("rendezvous");
    return store;
  }
};

struct OpenStores {
  std::mutex mutex;
  std::map<std::string, Open<WorldStore>> tcp;
  std::map<std::string, Open<c10d::FileStore>> file;
};

OpenStores& open_stores() {
  static auto* stores = [] {
    std::atexit([] { leave_stores(); });
    return new OpenStores();
  }();
  return *stores;
}

[[noreturn]] void raise_cannot_listen(const TcpPlace& place, const Listening& tried) {
  std::string fix = "choose another address or port (MASTER_ADDR, MASTER_PORT)";
  if (tried.error == EADDRINUSE) fix = "end the program that uses the port, or choose another (MASTER_PORT)";
  if (tried.error == EADDRNOTAVAIL) {
    fix =
        "start rank 0 on the machine that the address names; behind NAT or in a container let rank 0 listen on all "
        "addresses (MASTER_ADDR=0.0.0.0 for rank 0 only)";
  }
  raise<c10::DistNetworkError>(
      {"rendezvous", c10::str("rank 0 cannot listen at ", place.host, ":", place.port, ": ", tried.why), fix});
}

int take_listener(const TcpPlace& place) {
  if (place.listen_fd < 0) {
    const Listening made = listen_at(place.host, place.port, {.several_hosts = place.several_hosts});
    if (made.fd < 0) raise_cannot_listen(place, made);
    return made.fd;
  }
  const uint16_t port = port_of(place.listen_fd);
  if (port != 0 && (place.port == 0 || port == place.port)) return place.listen_fd;
  raise<c10::ValueError>(
      {"rendezvous",
       c10::str("SERRIED_MASTER_LISTEN_FD is ", place.listen_fd, ", which does not listen on port ", place.port),
       "unset SERRIED_MASTER_LISTEN_FD, or pass a socket that listens on MASTER_PORT"});
}

std::string find_server(const TcpPlace& place, milliseconds timeout) {
  const std::string address = wait_for_listener(place.host, place.port, timeout);
  if (!address.empty()) return address;
  raise<c10::DistNetworkError>(
      {"rendezvous", c10::str("nothing listens at ", place.host, ":", place.port, " after ", timeout.count(), " ms"),
       "start rank 0, and check its address and port (MASTER_ADDR, MASTER_PORT) and the firewall"});
}

// c10d waits for the server's first word without limit. A launcher's socket takes connections before rank 0 has come to
// it, and a stopped rank 0's for as long as it is stopped: then the thread that waits for an answer is left behind.
c10::intrusive_ptr<WorldStore> await_answer(const std::function<c10::intrusive_ptr<WorldStore>()>& open,
                                            const TcpPlace& place, Clock::time_point deadline) {
  const auto began = Clock::now();
  const auto answer = std::make_shared<std::promise<c10::intrusive_ptr<WorldStore>>>();
  std::future<c10::intrusive_ptr<WorldStore>> opened = answer->get_future();
  std::thread([open, answer] {
    try {
      answer->set_value(open());
    } catch (...) {
      answer->set_exception(std::current_exception());
    }
  }).detach();
  if (opened.wait_until(deadline) == std::future_status::ready) return opened.get();
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - began);
  raise<c10::DistNetworkError>(
      {"rendezvous",
       c10::str(place.host, ":", place.port, " takes connections, but rank 0 has not answered for ", waited.count(),
                " ms"),
       "look at what rank 0 is doing: it must make the group too, and may be stopped; or pass a longer timeout"});
}

c10::intrusive_ptr<WorldStore> connect(const TcpPlace& place, milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  c10d::TCPStoreOptions options;
  options.isServer = place.serve;
  options.waitWorkers = false;  // groups wait for each other by keys; waiting here too would double the start-up time
  options.useLibUV = place.use_libuv;
  // c10d cuts the time of a connection to whole seconds, and 0 would mean for ever.
  options.timeout = std::chrono::ceil<std::chrono::seconds>(timeout);
  if (place.serve) options.masterListenFd = take_listener(place);
  options.port = place.serve ? port_of(*options.masterListenFd) : place.port;
  const std::string address = place.serve ? local_address_of(*options.masterListenFd) : find_server(place, timeout);
  const auto open = [=] {
    const WithoutWarnings quiet;
    return c10::make_intrusive<WorldStore>(place, address, options);
  };
  c10::intrusive_ptr<WorldStore> store = place.serve ? open() : await_answer(open, place, deadline);
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

// For this user alone; a pipe in the file's place must not make the ranks wait.
void check_writable(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
  if (fd < 0) {
    raise<c10::ValueError>({"rendezvous", c10::str("cannot write file://", path, ": ", std::strerror(errno)),
                            "pass a path in a folder that exists and that all ranks can write"});
  }
  struct stat status {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  ::close(fd);
  if (regular) return;
  raise<c10::ValueError>(
      {"rendezvous", c10::str("file://", path, " is no regular file"), "pass a path where there is nothing yet"});
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_tcp_store(const TcpPlace& place, milliseconds timeout) {
  job_signer();  // before the atexit below is set: libcrypto then still works when it runs
  const std::string key = c10::str(place.host, ":", place.port, "#", place.rank, place.serve ? "s" : "");
  OpenStores& stores = open_stores();
  {
    std::lock_guard<std::mutex> lock(stores.mutex);
    const auto found = stores.tcp.find(key);
    if (found != stores.tcp.end() && place.port != 0) return signed_for_job(found->second.get());
  }
  // Not under the lock: ranks that are threads of one process wait for each other here.
  c10::intrusive_ptr<WorldStore> store = connect_any(place, timeout);
  std::lock_guard<std::mutex> lock(stores.mutex);
  stores.tcp.insert_or_assign(c10::str(place.host, ":", store->getPort(), "#", place.rank, place.serve ? "s" : ""),
                              Open<WorldStore>(store));
  return signed_for_job(store);
}

c10::intrusive_ptr<c10d::Store> open_generation_store(int generation, milliseconds timeout) {
  const std::shared_ptr<LauncherLine> line = LauncherLine::of_process();
  if (line == nullptr) return {};
  const auto store = c10::make_intrusive<LauncherStore>(line, env::text("MASTER_ADDR"));
  store->setTimeout(timeout);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("generation/", generation), signed_for_job(store));
}

c10::intrusive_ptr<c10d::Store> open_launcher_store(const std::string& master_addr, uint16_t master_port,
                                                    milliseconds timeout) {
  const std::shared_ptr<LauncherLine> line = LauncherLine::of_process();
  if (line == nullptr) return {};
  const auto store = c10::make_intrusive<LauncherStore>(line, master_addr);
  store->setTimeout(timeout);
  const std::string generation = env::text("SERRIED_GENERATION");
  const std::string place = generation.empty() ? "" : c10::str("generation/", generation, "/");
  return c10::make_intrusive<c10d::PrefixStore>(c10::str(place, "port/", master_port), signed_for_job(store));
}

c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int rank, int world_size) {
  OpenStores& stores = open_stores();
  std::lock_guard<std::mutex> lock(stores.mutex);
  const std::string key = c10::str(path, "#", rank);
  const auto found = stores.file.find(key);
  if (found != stores.file.end()) return signed_for_job(found->second.get());
  check_writable(path);
  const auto opened = stores.file.emplace(key, c10::make_intrusive<c10d::FileStore>(path, world_size)).first;
  return signed_for_job(opened->second.store);
}

c10::intrusive_ptr<c10d::Store> innermost_store(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return innermost_store(prefixed->getUnderlyingStore());
  }
  if (auto* sealed = dynamic_cast<SignedStore*>(store.get())) return innermost_store(sealed->underlying());
  return store;
}

std::string place_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> inner = innermost_store(store);
  if (auto* world = dynamic_cast<WorldStore*>(inner.get())) return world->place_text();
  if (auto* file = dynamic_cast<c10d::FileStore*>(inner.get())) return "file://" + file->getPath();
  if (dynamic_cast<LauncherStore*>(inner.get()) != nullptr) return "serried run";
  return "";
}

std::string address_towards_store(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> inner = innermost_store(store);
  if (auto* kept = dynamic_cast<LauncherStore*>(inner.get())) return address_towards(kept->towards());
  auto* tcp = dynamic_cast<c10d::TCPStore*>(inner.get());
  return tcp == nullptr ? "" : address_towards(tcp->getHost());
}

void abandon(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* world = dynamic_cast<WorldStore*>(innermost_store(store).get());
  if (world != nullptr) world->abandon();
}

void leave_stores() noexcept {
  try {
    std::map<std::string, Open<WorldStore>> tcp;
    std::map<std::string, Open<c10d::FileStore>> file;
    {
      std::lock_guard<std::mutex> lock(open_stores().mutex);
      tcp.swap(open_stores().tcp);
      file.swap(open_stores().file);
    }
    // Clients first: a process whose threads are ranks has the server and its clients.
    for (const bool servers : {false, true}) {
      for (const auto& [key, open] : tcp) {
        if (key.ends_with('s') == servers) open.store->farewell();
      }
    }
  } catch (...) {  // out of memory at exit: nothing to be done
  }
}

}  // namespace serried::detail
