// A mailroom between the wire's owner and the links.
#include "serried/comm/net/gloo/wire.h"

#include "serried/base/fork.h"
#include "serried/comm/backends/gloo/engine.h"
#include "serried/comm/net/gloo/link.h"
#include "serried/comm/net/mailroom.h"

namespace serried::net {
namespace {

class GlooWire final : public Wire {
 public:
  GlooWire(const detail::StoreRanks& ranks, const std::string& address)
      : rank_(ranks.rank), room_(std::make_shared<Mailroom>()) {
    gloo::EngineOptions options;
    options.timeout = ranks.timeout;
    options.address = address;
    engine_ = gloo::make_engine(ranks.store, ranks.rank, ranks.world_size, options);
    // The connections of one that has used and dropped its wire by then would close on those that still connect.
    detail::exchange(ranks, "new_group", "wired", "");
    room_->connect(std::vector<std::string>(size_t(ranks.world_size), "gloo"));
    for (int peer = 0; peer < ranks.world_size; ++peer) {
      links_.push_back(peer == rank_ ? nullptr : std::make_unique<GlooLink>(engine_, room_, peer));
    }
  }

  ~GlooWire() override {
    if (!home_.is_here()) {
      forget();
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const auto& link : links_) {
      if (link != nullptr) link->flush(deadline);
    }
    links_.clear();
    room_->close("this end of the wire is gone");
  }

  const char* name() const override { return "gloo"; }
  std::string address() const override { return "gloo"; }
  void connect(std::vector<std::string> addresses) override {}

  void send(Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override {
    const uint64_t number = room_->begin_send(transfer, peer, tag, bytes);
    if (number == 0) return;
    std::string copy(static_cast<const char*>(data), bytes);
    if (peer != rank_) return links_[size_t(peer)]->send(number, tag, std::move(copy));
    room_->bring(peer, tag, std::move(copy));
    room_->sent(number);
  }

  void receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) override {
    room_->receive(transfer, peer, tag, data, bytes);
  }

  bool progress() override { return room_->progress(); }
  int descriptor() const override { return room_->descriptor(); }
  bool arm() override { return room_->arm(); }
  void cancel(Transfer& transfer) override { room_->cancel(transfer); }

  void give_up(int peer, const std::string& why) override {
    room_->give_up(peer, why);
    if (peer >= 0 && peer < int(links_.size()) && peer != rank_) links_[size_t(peer)]->close();
  }

 private:
  // In a forked child: threads and connections are the parent's.
  void forget() {
    for (auto& link : links_) (void)link.release();
    (void)engine_.release();
  }

  const HomeProcess home_;
  const int rank_;
  const std::shared_ptr<Mailroom> room_;
  c10::intrusive_ptr<c10d::Backend> engine_;
  std::vector<std::unique_ptr<GlooLink>> links_;
};

}  // namespace

std::unique_ptr<Wire> make_gloo_wire(const detail::StoreRanks& ranks, const std::string& address) {
  return std::make_unique<GlooWire>(ranks, address);
}

}  // namespace serried::net
