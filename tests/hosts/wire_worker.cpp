// One of two ranks with a wire between them: `wire_worker <mode> <rank> <engine> <folder>`. Files in the folder say
// when to go on.
#include <poll.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <list>
#include <string>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/net/make_wire.h"
#include "serried/comm/rendezvous/world_store.h"
#include "tests/process/ranks/worker_output.h"

namespace {

using serried::net::Transfer;
using serried::net::Wire;
using serried::testing::now_ms;
using serried::testing::say;
using namespace std::chrono_literals;

struct Place {
  int rank;
  std::string folder;

  bool is_told(const char* word) const { return std::filesystem::exists(folder + "/" + word); }
};

/// Sleeps and looks, as ranks that wait do; false after 20 s.
bool wait_until(Wire& wire, const std::function<bool()>& condition) {
  const int64_t limit = now_ms() + 20'000;
  while (!condition()) {
    if (now_ms() > limit) return false;
    if (wire.progress() || !wire.arm()) continue;
    pollfd waiting{.fd = wire.descriptor(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, 50);
  }
  return true;
}

/// Messages of several sizes there and back.
void echo(Wire& wire, const Place& place) {
  for (const size_t size : {0, 1, 1000, 256 << 10, 1 << 20}) {
    const std::string mine(size, char('a' + place.rank));
    std::string theirs(size, '.');
    Transfer sent, received;
    wire.receive(received, 1 - place.rank, 7, theirs.data(), size);
    wire.send(sent, 1 - place.rank, 7, mine.data(), size);
    const bool ended = wait_until(wire, [&] { return sent.ended() && received.ended(); });
    const bool right = theirs == std::string(size, char('b' - place.rank)) && received.bytes == size;
    if (!ended || !right) return say(c10::str("wrong at ", size, " bytes: ", sent.error, received.error));
  }
  say(c10::str("echo by ", wire.name()));
  wait_until(wire, [&] { return place.is_told("go"); });
}

/// Rank 0 has a receive and more sends under way than fit between two hosts, when rank 1, which only listens, is lost.
void lose(Wire& wire, const Place& place) {
  if (place.rank == 1) {
    say("ready");
    wait_until(wire, [&] { return place.is_told("done"); });
    return;
  }
  std::string memory(10, '.');
  const std::string bytes(1 << 20, 'x');
  Transfer receive;
  std::list<Transfer> sends;
  wire.receive(receive, 1, 7, memory.data(), memory.size());
  say("ready");
  wait_until(wire, [&] { return place.is_told("go"); });
  for (int i = 0; i < 64; ++i) wire.send(sends.emplace_back(), 1, 8, bytes.data(), bytes.size());
  if (place.is_told("freeze")) {
    wait_until(wire, [&, until = now_ms() + 300] { return now_ms() > until; });
    say(receive.ended() || sends.back().ended() ? "ended by itself" : "silence");
    const int64_t begin = now_ms();
    wire.give_up(1, "the launcher says so");
    say(now_ms() - begin < 500 ? "given up in time" : c10::str("given up after ", now_ms() - begin, " ms"));
  }
  const bool all = wait_until(wire, [&] {
    for (const Transfer& send : sends) {
      if (!send.ended()) return false;
    }
    return receive.ended();
  });
  say(all ? "all ended" : "not all ended");
  say("receive: " + receive.error);
  say("last send: " + sends.back().error);
}

void run(const std::string& mode, const Place& place, const std::string& engine) {
  const auto store = serried::detail::open_tcp_store({.host = "h0",
                                                      .port = 29511,
                                                      .rank = place.rank,
                                                      .world_size = 2,
                                                      .serve = place.rank == 0,
                                                      .several_hosts = true},
                                                     20s);
  auto wire = serried::net::make_wire({c10::make_intrusive<c10d::PrefixStore>("wire", store), place.rank, 2, 20s},
                                      {.engine = engine});
  if (mode == "echo") echo(*wire, place);
  if (mode == "lose") lose(*wire, place);
  const int64_t begin = now_ms();
  wire.reset();
  say(now_ms() - begin < 2000 ? "destroyed in time" : c10::str("destroyed after ", now_ms() - begin, " ms"));
  if (mode == "lose") serried::detail::abandon(store);
}

}  // namespace

int main(int, char** argv) {
  try {
    run(argv[1], {std::stoi(argv[2]), argv[4]}, argv[3]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 4;
  }
  return 0;
}
