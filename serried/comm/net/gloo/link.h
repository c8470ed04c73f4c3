// One peer, by gloo: gloo says that a message has come or gone only to a thread that waits for it, so there are two.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "serried/comm/net/mailroom.h"

namespace serried::net {

/// Messages wait for their turn as copies: what is the caller's is never gloo's.
class GlooLink {
 public:
  GlooLink(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<Mailroom> room, int peer);

  /// Waits for neither messages nor the peer.
  ~GlooLink();
  GlooLink(const GlooLink&) = delete;
  GlooLink& operator=(const GlooLink&) = delete;

  /// `number` is that of the mailroom.
  void send(uint64_t number, uint64_t tag, std::string bytes);

  /// Nothing goes or comes any more.
  void close();

  /// Whether all has been sent by then, or cannot be.
  bool flush(std::chrono::steady_clock::time_point deadline);

 private:
  struct Message {
    uint64_t number;
    uint64_t tag;
    std::string bytes;
  };
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Start = std::function<WorkPtr(std::vector<at::Tensor>& tensors)>;

  void write_all();
  void read_all();
  void write(Message& message);
  void guard(void (GlooLink::*run)());
  void wait(WorkPtr& place, const Start& start, at::Tensor tensor);

  const c10::intrusive_ptr<c10d::Backend> engine_;
  const std::shared_ptr<Mailroom> room_;
  const int peer_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Message> messages_;
  bool is_writing_ = false;
  bool is_closed_ = false;
  WorkPtr sending_, receiving_;  // what a thread waits in
  std::thread writer_, reader_;
};

}  // namespace serried::net
