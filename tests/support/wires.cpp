// What it takes to connect wires of each kind.
#include "tests/support/wires.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "tests/support/thread_wire.h"

namespace serried::testing {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

}  // namespace

Wires make_wires(const std::string& kind, int size) {
  Wires wires;
  if (kind == "threads") {
    for (auto& wire : make_thread_wires(size)) wires.push_back(std::move(wire));
    return wires;
  }
  throw std::runtime_error("no wire " + kind);
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
