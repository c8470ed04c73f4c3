// The schemes env://, tcp:// and file://, and the table that more can be added to.
#include "serried/comm/rendezvous/rendezvous.h"

#include <map>
#include <mutex>
#include <vector>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/url.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried {
namespace {

using detail::Url;

// Collects all that is wrong with a url, so that one error names everything.
class Reader {
 public:
  Reader(const Url& url, const RendezvousOptions& options) : url_(url), options_(options) {}

  int rank() { return int(number("rank", options_.rank)); }
  int world_size() { return int(number("world_size", options_.world_size)); }

  int64_t port() {
    if (url_.port.empty()) return wrong("port is missing");
    const auto value = detail::parse_integer(url_.port);
    if (value && *value >= 0 && *value <= 65535) return *value;
    return wrong(c10::str("port is \"", url_.port, "\", not 0..65535"));
  }

  int64_t wrong(const std::string& what) {
    problems_.push_back(what);
    return -1;
  }

  void check(const std::string& example) const {
    if (problems_.empty()) return;
    raise<c10::ValueError>({"rendezvous", c10::str(url_.text, ": ", c10::Join("; ", problems_)), "write " + example});
  }

 private:
  int64_t number(const std::string& name, int given) {
    const auto found = url_.query.find(name);
    if (found == url_.query.end()) return given >= 0 ? given : wrong(name + " is missing");
    const std::string problem = detail::why_no_rank(found->second);
    if (!problem.empty()) return wrong(c10::str(name, " is \"", found->second, "\", ", problem));
    return *detail::parse_integer(found->second);
  }

  const Url& url_;
  const RendezvousOptions& options_;
  std::vector<std::string> problems_;
};

void check_ranks(const std::string& url, int64_t rank, int64_t world_size) {
  if (world_size < 1) {
    raise<c10::ValueError>(
        {"rendezvous", c10::str(url, ": world_size is ", world_size), "pass the number of ranks, 1 or more"});
  }
  if (rank >= 0 && rank < world_size) return;
  raise<c10::ValueError>({"rendezvous", c10::str(url, ": rank ", rank, " is not in 0..", world_size - 1),
                          "pass each rank once, counted from 0"});
}

bool wants_libuv(const Url& url) {
  const auto found = url.query.find("use_libuv");
  if (found == url.query.end()) return env::flag("USE_LIBUV");
  return found->second == "1" || found->second == "true" || found->second == "True";
}

Meeting meet_tcp(const std::string& text, const RendezvousOptions& options) {
  const Url url = detail::parse_url(text);
  Reader reader(url, options);
  if (url.host.empty()) reader.wrong("host is missing");
  const int64_t port = reader.port();
  const int rank = reader.rank();
  const int world_size = reader.world_size();
  reader.check("tcp://host:29500?rank=0&world_size=2");
  check_ranks(text, rank, world_size);
  const detail::TcpPlace place{.host = url.host,
                               .port = uint16_t(port),
                               .rank = rank,
                               .world_size = world_size,
                               .serve = rank == 0,
                               .listen_fd = -1,
                               .use_libuv = wants_libuv(url)};
  return {detail::open_tcp_store(place, options.timeout), rank, world_size};
}

Meeting meet_file(const std::string& text, const RendezvousOptions& options) {
  const Url url = detail::parse_url(text);
  Reader reader(url, options);
  if (!url.host.empty())
    reader.wrong(c10::str("\"", url.host, "\" stands where a host would; the path must be absolute"));
  if (url.path.empty()) reader.wrong("path is missing");
  const int rank = reader.rank();
  const int world_size = reader.world_size();
  reader.check("file:///path/to/file?rank=0&world_size=2");
  check_ranks(text, rank, world_size);
  auto store = detail::open_file_store(url.path, rank, world_size);
  store->setTimeout(options.timeout);
  return {store, rank, world_size};
}

Meeting meet_env(const std::string& text, const RendezvousOptions& options) {
  const Url url = detail::parse_url(text);
  detail::GivenRanks given{.rank = options.rank, .world_size = options.world_size};
  Reader reader(url, options);
  if (url.query.contains("rank")) given.rank = reader.rank();
  if (url.query.contains("world_size")) given.world_size = reader.world_size();
  reader.check("env:// or env://?rank=0&world_size=2");
  const detail::LaunchEnvironment job = detail::read_launch_environment(given);
  check_ranks(text, job.rank, job.world_size);
  if (const auto store = detail::open_launcher_store(job.master_addr, job.master_port, options.timeout)) {
    return {store, job.rank, job.world_size};
  }
  const bool serve = job.rank == 0 && !job.agent_keeps_store;
  const detail::TcpPlace place{.host = job.master_addr,
                               .port = job.master_port,
                               .rank = job.rank,
                               .world_size = job.world_size,
                               .serve = serve,
                               .listen_fd = serve ? detail::take_listen_fd() : -1,
                               .use_libuv = wants_libuv(url),
                               .several_hosts = job.several_hosts};
  return {detail::open_tcp_store(place, options.timeout), job.rank, job.world_size};
}

struct Handlers {
  std::mutex mutex;
  std::map<std::string, RendezvousHandler> table{{"env", meet_env}, {"file", meet_file}, {"tcp", meet_tcp}};
};

Handlers& handlers() {
  static auto* all = new Handlers();
  return *all;
}

RendezvousHandler find_handler(const std::string& url) {
  const std::string scheme = detail::parse_url(url).scheme;
  std::lock_guard<std::mutex> lock(handlers().mutex);
  const auto found = handlers().table.find(scheme);
  if (found != handlers().table.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [name, handler] : handlers().table) known.push_back(name + "://");
  raise<c10::ValueError>({"rendezvous", c10::str("nobody handles \"", url, "\"; known: ", c10::Join(", ", known)),
                          "use one of the known schemes, or register_rendezvous_handler"});
}

}  // namespace

Meeting rendezvous(const std::string& url, const RendezvousOptions& options) {
  const trace::Span span("rendezvous", trace::kSetup);
  return find_handler(url)(url, options);
}

void register_rendezvous_handler(const std::string& scheme, RendezvousHandler handler) {
  std::lock_guard<std::mutex> lock(handlers().mutex);
  if (handlers().table.emplace(scheme, std::move(handler)).second) return;
  raise<c10::ValueError>(
      {"register_rendezvous_handler", c10::str("the scheme \"", scheme, "\" is taken"), "choose another name"});
}

}  // namespace serried
