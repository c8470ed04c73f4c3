// Wires between threads of this process: ranks on different hosts, without hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/comm/net/mailroom.h"

namespace serried::testing {

/// One end. A message of up to 64 KiB is sent at the sender's next `progress`, a larger one after the peer's. Its
/// destructor is what peers see of a process that leaves.
class ThreadWire final : public net::Wire {
 public:
  explicit ThreadWire(int rank);
  ~ThreadWire() override;

  const char* name() const override { return "threads"; }
  std::string address() const override;
  void connect(std::vector<std::string> addresses) override;
  void send(net::Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override;
  void receive(net::Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) override;
  bool progress() override;
  int descriptor() const override { return room_->descriptor(); }
  bool arm() override { return room_->arm(); }
  void cancel(net::Transfer& transfer) override { room_->cancel(transfer); }
  void give_up(int peer, const std::string& why) override { room_->give_up(peer, why); }

  /// From now on this end does what that of a killed process does: peers lose it, and nothing of it arrives. Any thread
  /// may call.
  void die();

  /// What that of a frozen host does: peers hear nothing, until they give it up. Any thread may call.
  void freeze();

 private:
  struct End;

  void leave(const std::string& why);

  const std::shared_ptr<net::Mailroom> room_;
  const std::unique_ptr<End> end_;
};

/// One per rank, connected.
std::vector<std::unique_ptr<ThreadWire>> make_thread_wires(int size);

}  // namespace serried::testing
