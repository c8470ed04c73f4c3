// A message is "SRD1", the length of its body, and the body: each field as its length and its bytes.
#include "serried/base/channel/message.h"

#include <arpa/inet.h>

#include <charconv>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace serried::channel {
namespace {

constexpr std::string_view kMagic = "SRD1";
constexpr size_t kHeader = 8;

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
  size_t size = 0;
  for (const std::string& field : message) size += 4 + field.size();
  std::string bytes(kMagic);
  bytes.reserve(kHeader + size);
  append_number(bytes, size);
  for (const std::string& field : message) {
    append_number(bytes, field.size());
    bytes += field;
  }
  return bytes;
}

Message decode(std::string& bytes, size_t most) {
  if (!bytes.starts_with(kMagic.substr(0, bytes.size()))) throw std::runtime_error("not a message");
  if (bytes.size() < kHeader) return {};
  const uint32_t size = number_at(bytes, kMagic.size());
  if (size > most) throw std::runtime_error("message too long");
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

}  // namespace serried::channel
