// Receives and messages by peer and tag, and an eventfd that says that there is something to take.
#include "serried/comm/net/mailroom.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "serried/base/error.h"
#include "serried/comm/net/transfers.h"

namespace serried::net {

Mailroom::Mailroom() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ >= 0) return;
  raise<c10::DistBackendError>({"new_group", c10::str("no descriptor to wait on: ", std::strerror(errno)),
                                "raise the limit on open files: ulimit -n"});
}

Mailroom::~Mailroom() {
  ::close(descriptor_);
}

void Mailroom::connect(const std::vector<std::string>& addresses) {
  const std::scoped_lock lock(mutex_);
  num_peers_ = int(addresses.size());
  for (int peer = 0; peer < num_peers_; ++peer) {
    if (addresses[size_t(peer)].empty()) lost_.emplace(peer, "it has given no address");
  }
}

void Mailroom::receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (!begin_tagged(transfer, peer, tag)) return;
  const Key key(peer, tag);
  const auto found = waiting_.find(key);
  posted_[key].push_back({&transfer, data, bytes});
  if (found == waiting_.end()) {
    if (fail_if_lost(transfer, peer)) posted_.erase(key);
    return;
  }
  std::string message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) waiting_.erase(found);
  match(key, std::move(message));
}

bool Mailroom::progress() {
  const std::scoped_lock lock(mutex_);
  if (events_.empty()) return false;
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = ::read(descriptor_, &count, sizeof count);
  std::vector<Event> events;
  events.swap(events_);
  for (Event& event : events) take(event);
  return true;
}

bool Mailroom::arm() {
  const std::scoped_lock lock(mutex_);
  return events_.empty();
}

void Mailroom::cancel(Transfer& transfer) {
  const std::scoped_lock lock(mutex_);
  if (transfer.ended()) return;
  for (auto& [key, queue] : posted_) {
    std::erase_if(queue, [&](const Posted& posted) { return posted.transfer == &transfer; });
  }
  std::erase_if(posted_, [](const auto& entry) { return entry.second.empty(); });
  std::erase_if(sends_, [&](const auto& entry) { return entry.second == &transfer; });
  end(transfer, Transfer::State::cancelled, 0);
}

void Mailroom::give_up(int peer, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    fail_all(peer, why);
    given_up_.insert(peer);
    std::erase_if(waiting_, [&](const auto& entry) { return entry.first.first == peer; });
  }
  // Who sleeps has to look.
  add({.kind = Event::Kind::wake});
}

uint64_t Mailroom::begin_send(Transfer& transfer, int peer, uint64_t tag, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (!begin_tagged(transfer, peer, tag) || fail_if_lost(transfer, peer)) return 0;
  transfer.bytes = bytes;
  sends_[++last_number_] = &transfer;
  return last_number_;
}

void Mailroom::close(const std::string& why) {
  const std::scoped_lock lock(mutex_);
  for (auto& [key, queue] : posted_) {
    for (const Posted& posted : queue) fail(*posted.transfer, why);
  }
  for (auto& [number, transfer] : sends_) fail(*transfer, why);
  posted_.clear();
  sends_.clear();
}

void Mailroom::bring(int peer, uint64_t tag, std::string bytes) {
  add({.kind = Event::Kind::message, .peer = peer, .number = tag, .text = std::move(bytes)});
}

void Mailroom::sent(uint64_t number) {
  add({.kind = Event::Kind::sent, .number = number});
}

void Mailroom::lose(int peer, std::string why) {
  add({.kind = Event::Kind::lost, .peer = peer, .text = std::move(why)});
}

void Mailroom::add(Event event) {
  const std::scoped_lock lock(mutex_);
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t size = ::write(descriptor_, &one, sizeof one);
}

void Mailroom::take(Event& event) {
  if (given_up_.contains(event.peer)) return;
  switch (event.kind) {
    case Event::Kind::message: return match({event.peer, event.number}, std::move(event.text));
    case Event::Kind::lost: return fail_all(event.peer, event.text);
    case Event::Kind::wake: return;
    case Event::Kind::sent: break;
  }
  const auto found = sends_.find(event.number);
  if (found == sends_.end()) return;  // cancelled
  end(*found->second, Transfer::State::done, found->second->bytes);
  sends_.erase(found);
}

// The message to the receive that has waited longest for it, else it waits itself.
void Mailroom::match(const Key& key, std::string bytes) {
  const auto found = posted_.find(key);
  if (found == posted_.end()) {
    waiting_[key].push_back(std::move(bytes));
    return;
  }
  const Posted posted = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  if (bytes.size() > posted.bytes) {
    return fail(*posted.transfer, truncated_text(key.first, key.second, bytes.size(), posted.bytes));
  }
  if (!bytes.empty()) std::memcpy(posted.data, bytes.data(), bytes.size());
  end(*posted.transfer, Transfer::State::done, bytes.size());
}

bool Mailroom::fail_if_lost(Transfer& transfer, int peer) {
  const auto found = lost_.find(peer);
  if (peer < 0 || peer >= num_peers_) {
    fail(transfer, no_rank_text(peer, num_peers_));
    return true;
  }
  if (found == lost_.end()) return false;
  fail(transfer, lost_text(peer, found->second));
  return true;
}

void Mailroom::fail_all(int peer, const std::string& why) {
  lost_.emplace(peer, why);
  for (auto& [key, queue] : posted_) {
    if (key.first != peer) continue;
    for (const Posted& posted : queue) fail(*posted.transfer, lost_text(peer, why));
  }
  std::erase_if(posted_, [&](const auto& entry) { return entry.first.first == peer; });
  std::erase_if(sends_, [&](const auto& entry) {
    if (entry.second->peer != peer) return false;
    fail(*entry.second, lost_text(peer, why));
    return true;
  });
}

}  // namespace serried::net
