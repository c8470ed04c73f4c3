// What it takes to connect wires of each kind.
#include "tests/support/wires.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/net/make_wire.h"
#include "tests/support/thread_wire.h"

namespace serried::testing {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

// Raises what the first of them raises.
void on_threads(int count, const std::function<void(int)>& run) {
  std::vector<std::future<void>> all;
  for (int i = 0; i < count; ++i) all.push_back(std::async(std::launch::async, run, i));
  for (auto& one : all) one.wait();
  for (auto& one : all) one.get();
}

}  // namespace

Wires::~Wires() {
  on_threads(int(size()), [&](int rank) { at(size_t(rank)).reset(); });
}

Wires make_wires(const std::string& kind, int size) {
  Wires wires;
  if (kind == "threads") {
    for (auto& wire : make_thread_wires(size)) wires.push_back(std::move(wire));
    return wires;
  }
  wires.resize(size_t(size));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(size, [&](int rank) {
    wires[size_t(rank)] = net::make_wire({.store = store, .rank = rank, .world_size = size, .timeout = 20s},
                                         {.address = "127.0.0.1", .engine = kind == "gloo" ? "gloo" : "auto"});
  });
  return wires;
}

bool finish(const Wires& wires, const std::vector<const net::Transfer*>& transfers) {
  const auto ended = [](const net::Transfer* transfer) { return transfer->ended(); };
  const auto limit = steady_clock::now() + 20s;
  while (!std::all_of(transfers.begin(), transfers.end(), ended)) {
    if (steady_clock::now() > limit) return false;
    bool any = false;
    for (const auto& wire : wires) any |= wire != nullptr && wire->progress();
    if (!any) std::this_thread::yield();
  }
  return true;
}

}  // namespace serried::testing
