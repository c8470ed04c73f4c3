// Sends and receives between ranks of different hosts.
#pragma once

#include "serried/comm/backends/hierarchical/links.h"
#include "serried/comm/backends/hierarchical/stream.h"
#include "serried/comm/backends/shm/far_mail.h"

#include <atomic>
#include <optional>
#include <string>
#include <vector>

namespace serried::hierarchical {

/// A message is an envelope, which has all of a small one's bytes in it; a large one's follow once its receiver has
/// found memory for them and said so.
class WireMail final : public shm::FarMail {
 public:
  WireMail(Links& links, const Topology& topology, int rank);
  ~WireMail() override;

  bool reaches(int peer) const override;
  bool push(shm::Transfer& transfer) override;
  std::optional<shm::MessageHeader> next(int source) override;
  bool pull(int source, char* to) override;
  std::string loss(int peer) const override;
  void stop() override;
  void progress() override { links_.progress(); }
  void sleep(std::chrono::milliseconds longest) override {
    links_.sleep(longest, [] { return false; });
  }

 private:
  static constexpr int64_t kMostEnclosed = 32 << 10;

  /// One message on its way out or in, and what remains of the last.
  struct Message {
    bool is_open = false;
    std::vector<char> envelope;
    net::Transfer envelope_transfer;
    char ready = 0;
    net::Transfer ready_transfer;
    std::optional<Stream> payload;
  };

  shm::MessageHeader header_of(const Message& message) const;
  bool is_large(const Message& message) const { return header_of(message).bytes > kMostEnclosed; }
  void begin(Message& out, const shm::Transfer& transfer);
  bool came(const net::Transfer& transfer, int peer);
  bool went_on(Message& message, int peer);
  void cancel(Message& message);

  Links& links_;
  const Topology& topology_;
  const int rank_;
  bool stopped_ = false;
  std::vector<Message> outgoing_;
  std::vector<Message> incoming_;
  std::vector<std::string> losses_;
};

}  // namespace serried::hierarchical
