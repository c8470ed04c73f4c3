// A message is "SRD1", the length of its body, and the body: each field as its length and its bytes.
#include "serried/launch/wire.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace serried::launch {
namespace {

constexpr std::string_view kMagic = "SRD1";
constexpr size_t kHeader = 8;
constexpr uint32_t kMaxBody = 1 << 20;

void append_number(std::string& bytes, size_t number) {
  const uint32_t value = htonl(static_cast<uint32_t>(number));
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

uint32_t number_at(const std::string& bytes, size_t offset) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return ntohl(value);
}

}  // namespace

std::string encode(const Message& message) {
  std::string body;
  for (const std::string& field : message) {
    append_number(body, field.size());
    body += field;
  }
  std::string bytes(kMagic);
  append_number(bytes, body.size());
  return bytes + body;
}

Message decode(std::string& bytes) {
  if (!bytes.starts_with(kMagic.substr(0, bytes.size()))) throw std::runtime_error("not a message");
  if (bytes.size() < kHeader) return {};
  const uint32_t size = number_at(bytes, kMagic.size());
  if (size > kMaxBody) throw std::runtime_error("message too long");
  if (bytes.size() < kHeader + size) return {};
  Message message;
  size_t at = kHeader;
  const size_t end = kHeader + size;
  while (at < end) {
    if (at + 4 > end || number_at(bytes, at) > end - at - 4) throw std::runtime_error("field too long");
    const uint32_t length = number_at(bytes, at);
    message.push_back(bytes.substr(at + 4, length));
    at += 4 + length;
  }
  if (message.empty()) throw std::runtime_error("empty message");
  bytes.erase(0, end);
  return message;
}

int number_in(const std::string& field) {
  int number = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), number);
  if (error != std::errc() || end != field.data() + field.size()) throw std::runtime_error("not a number: " + field);
  return number;
}

Connection::Connection(Fd socket) : socket_(std::move(socket)) {}

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
  while (open) {
    char buffer[4096];
    const ssize_t count = ::recv(socket_.get(), buffer, sizeof buffer, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) open = false;
    if (count > 0) in_.append(buffer, static_cast<size_t>(count));
  }
  try {
    for (Message message; !(message = decode(in_)).empty();) messages.push_back(std::move(message));
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
