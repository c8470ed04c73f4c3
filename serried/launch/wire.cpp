// Sending and receiving without blocking.
#include "serried/launch/wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <stdexcept>

namespace serried::launch {
namespace {

// In one turn: who sends without end must not keep the launcher from all else.
constexpr size_t kMostAtOnce = 1 << 20;

}  // namespace

Connection::Connection(Fd socket, size_t most_bytes) : socket_(std::move(socket)), most_bytes_(most_bytes) {}

void Connection::send(const Message& message) {
  if (closed()) return;
  out_ += encode(message);
  flush();
}

void Connection::flush() {
  while (!closed() && !out_.empty()) {
    const ssize_t count = ::send(socket_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    // What the peer said before it went is still to be read, so the end shows in receive() only.
    if (count < 0 && errno != EAGAIN) out_.clear();
    if (count < 0) return;
    out_.erase(0, static_cast<size_t>(count));
  }
}

std::vector<Message> Connection::receive() {
  std::vector<Message> messages;
  bool open = !closed();
  for (size_t before = num_received_; open && num_received_ - before < kMostAtOnce;) {
    char buffer[16384];
    const ssize_t count = ::recv(socket_.get(), buffer, sizeof buffer, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) open = false;
    if (count <= 0) continue;
    in_.append(buffer, static_cast<size_t>(count));
    num_received_ += static_cast<size_t>(count);
  }
  try {
    for (Message message; !(message = decode(in_, most_bytes_)).empty();) messages.push_back(std::move(message));
  } catch (const std::runtime_error&) {
    open = false;
  }
  if (!open) close();
  return messages;
}

short Connection::events() const {
  return static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT);
}

}  // namespace serried::launch
