// A message is two of gloo's: its tag and size, then its bytes.
#include "serried/comm/net/gloo/link.h"

#include <array>
#include <utility>

#include <ATen/ops/from_blob.h>

namespace serried::net {
namespace {

// gloo's own tags, of 32 bits.
constexpr int kHeaderTag = 0;
constexpr int kBytesTag = 1;
// gloo closes all connections at a timeout; waits are ended by `close` instead.
constexpr std::chrono::hours kForEver(24 * 365);

struct Closed {};

at::Tensor tensor_of(void* data, size_t bytes) {
  return at::from_blob(data, {int64_t(bytes)}, at::kByte);
}

// Of gloo's texts the first line, without the place in its sources.
std::string reason(const std::exception& error) {
  std::string text = error.what();
  text.resize(std::min(text.size(), text.find('\n')));
  return text.starts_with('[') ? text.substr(std::min(text.size(), text.find("] ") + 2)) : text;
}

}  // namespace

GlooLink::GlooLink(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<Mailroom> room, int peer)
    : engine_(std::move(engine)), room_(std::move(room)), peer_(peer) {
  writer_ = std::thread([this] { guard(&GlooLink::write_all); });
  reader_ = std::thread([this] { guard(&GlooLink::read_all); });
}

GlooLink::~GlooLink() {
  close();
  writer_.join();
  reader_.join();
}

void GlooLink::send(uint64_t number, uint64_t tag, std::string bytes) {
  const std::scoped_lock lock(mutex_);
  messages_.push_back({number, tag, std::move(bytes)});
  changed_.notify_all();
}

void GlooLink::close() {
  const std::scoped_lock lock(mutex_);
  is_closed_ = true;
  messages_.clear();
  if (sending_) sending_->abort();
  if (receiving_) receiving_->abort();
  changed_.notify_all();
}

bool GlooLink::flush(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return is_closed_ || (messages_.empty() && !is_writing_); });
}

// Whatever goes wrong between two ranks, the peer is lost to this one.
void GlooLink::guard(void (GlooLink::*run)()) {
  try {
    (this->*run)();
  } catch (const Closed&) {
    return;
  } catch (const std::exception& error) {
    room_->lose(peer_, reason(error));
  }
  close();
}

void GlooLink::write_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_closed_ || !messages_.empty(); });
    if (is_closed_) throw Closed();
    Message message = std::move(messages_.front());
    messages_.pop_front();
    is_writing_ = true;
    lock.unlock();
    write(message);
    lock.lock();
    is_writing_ = false;
    changed_.notify_all();
  }
}

void GlooLink::write(Message& message) {
  std::array<uint64_t, 2> header{message.tag, message.bytes.size()};
  const auto start = [&](int tag) {
    return [this, tag](std::vector<at::Tensor>& tensors) { return engine_->send(tensors, peer_, tag); };
  };
  wait(sending_, start(kHeaderTag), tensor_of(header.data(), sizeof header));
  if (!message.bytes.empty()) {
    wait(sending_, start(kBytesTag), tensor_of(message.bytes.data(), message.bytes.size()));
  }
  room_->sent(message.number);
}

void GlooLink::read_all() {
  const auto start = [&](int tag) {
    return [this, tag](std::vector<at::Tensor>& tensors) { return engine_->recv(tensors, peer_, tag); };
  };
  while (true) {
    std::array<uint64_t, 2> header{};
    wait(receiving_, start(kHeaderTag), tensor_of(header.data(), sizeof header));
    std::string bytes(header[1], '\0');
    if (!bytes.empty()) wait(receiving_, start(kBytesTag), tensor_of(bytes.data(), bytes.size()));
    room_->bring(peer_, header[0], std::move(bytes));
  }
}

// Returns when the message is over; throws Closed where this link is.
void GlooLink::wait(WorkPtr& place, const Start& start, at::Tensor tensor) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  WorkPtr work;
  {
    const std::scoped_lock lock(mutex_);
    if (is_closed_) throw Closed();
    work = place = start(tensors);
  }
  bool is_over = false;
  try {
    is_over = work->wait(kForEver);
  } catch (const std::exception&) {
    const std::scoped_lock lock(mutex_);
    place.reset();
    if (is_closed_) throw Closed();
    throw;
  }
  const std::scoped_lock lock(mutex_);
  place.reset();
  if (is_closed_ && !is_over) throw Closed();
}

}  // namespace serried::net
