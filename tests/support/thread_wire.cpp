// Each end is a mailroom that the other ends bring their messages to.
#include "tests/support/thread_wire.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/comm/net/transfers.h"

namespace serried::testing {

using net::Mailroom;
using net::Transfer;

/// What peers see of a wire.
struct ThreadWire::End {
  int rank;
  std::string address;
  std::shared_ptr<Mailroom> room;
  std::vector<std::string> peers = {};
  std::vector<std::pair<std::shared_ptr<Mailroom>, uint64_t>> large =
      {};  // whose sends end when this end takes them in
  bool gone = false;
  bool frozen = false;

  bool is_silent() const { return gone || frozen; }
};

namespace {

constexpr size_t kLarge = 64 << 10;

std::mutex ends_mutex;  // guards all ends, and keeps messages in the order of sending

template <class End>
std::map<std::string, End*>& all_ends() {
  static std::map<std::string, End*> ends;
  return ends;
}

template <class End>
End* find_end(const std::vector<std::string>& addresses, int peer) {
  const auto found = all_ends<End>().find(addresses[size_t(peer)]);
  return found == all_ends<End>().end() ? nullptr : found->second;
}

}  // namespace

ThreadWire::ThreadWire(int rank)
    : room_(std::make_shared<Mailroom>()), end_(new End{.rank = rank, .address = "", .room = room_}) {
  static uint64_t count = 0;
  const std::scoped_lock lock(ends_mutex);
  end_->address = c10::str("thread:", ++count);
  all_ends<End>()[end_->address] = end_.get();
}

ThreadWire::~ThreadWire() {
  leave("it has left");
  room_->close("this end of the wire is gone");
  const std::scoped_lock lock(ends_mutex);
  all_ends<End>().erase(end_->address);
}

std::string ThreadWire::address() const {
  return end_->address;
}

void ThreadWire::connect(std::vector<std::string> addresses) {
  const std::scoped_lock lock(ends_mutex);
  room_->connect(addresses);
  end_->peers = std::move(addresses);
  for (int peer = 0; peer < int(end_->peers.size()); ++peer) {
    const End* other = find_end<End>(end_->peers, peer);
    if ((other == nullptr || other->gone) && !end_->peers[size_t(peer)].empty()) room_->lose(peer, "it has left");
  }
}

void ThreadWire::send(Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) {
  const std::scoped_lock lock(ends_mutex);
  const uint64_t number = room_->begin_send(transfer, peer, tag, bytes);
  if (number == 0) return;
  End* other = find_end<End>(end_->peers, peer);
  const bool reaches = other != nullptr && !other->is_silent() && !end_->is_silent();
  if (reaches) other->room->bring(end_->rank, tag, std::string(static_cast<const char*>(data), bytes));
  if (bytes <= kLarge) return room_->sent(number);
  if (reaches) other->large.emplace_back(room_, number);
}

void ThreadWire::receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) {
  room_->receive(transfer, peer, tag, data, bytes);
}

bool ThreadWire::progress() {
  const bool any = room_->progress();
  const std::scoped_lock lock(ends_mutex);
  if (end_->is_silent()) return any;
  for (const auto& [room, number] : std::exchange(end_->large, {})) room->sent(number);
  return any;
}

void ThreadWire::die() {
  leave("connection reset");
}

void ThreadWire::freeze() {
  const std::scoped_lock lock(ends_mutex);
  end_->frozen = true;
}

void ThreadWire::leave(const std::string& why) {
  const std::scoped_lock lock(ends_mutex);
  if (std::exchange(end_->gone, true)) return;
  for (const auto& [address, other] : all_ends<End>()) {
    const auto found = std::find(other->peers.begin(), other->peers.end(), end_->address);
    if (found != other->peers.end()) other->room->lose(int(found - other->peers.begin()), why);
  }
}

std::vector<std::unique_ptr<ThreadWire>> make_thread_wires(int size) {
  std::vector<std::unique_ptr<ThreadWire>> wires;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size; ++rank) {
    wires.push_back(std::make_unique<ThreadWire>(rank));
    addresses.push_back(wires.back()->address());
  }
  for (const auto& wire : wires) wire->connect(addresses);
  return wires;
}

}  // namespace serried::testing
