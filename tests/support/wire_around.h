// A wire that hands everything on to another one: base of those that count or change what is sent.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serried/comm/net/wire.h"

namespace serried::testing {

class WireAround : public net::Wire {
 public:
  explicit WireAround(std::unique_ptr<net::Wire> wire) : wire_(std::move(wire)) {}

  const char* name() const override { return wire_->name(); }
  std::string address() const override { return wire_->address(); }
  void connect(std::vector<std::string> addresses) override { wire_->connect(std::move(addresses)); }
  void send(net::Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override {
    wire_->send(transfer, peer, tag, data, bytes);
  }
  void receive(net::Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) override {
    wire_->receive(transfer, peer, tag, data, bytes);
  }
  bool progress() override { return wire_->progress(); }
  int descriptor() const override { return wire_->descriptor(); }
  bool arm() override { return wire_->arm(); }
  void cancel(net::Transfer& transfer) override { wire_->cancel(transfer); }
  void give_up(int peer, const std::string& why) override { wire_->give_up(peer, why); }

 private:
  const std::unique_ptr<net::Wire> wire_;
};

}  // namespace serried::testing
