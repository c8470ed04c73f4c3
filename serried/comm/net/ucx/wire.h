// Messages by UCX: TCP, or what its fabric offers. One worker, with an endpoint per peer, and its matching of tags.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "serried/base/fork.h"
#include "serried/comm/net/ucx/context.h"
#include "serried/comm/net/ucx/doorbell.h"
#include "serried/comm/net/wire.h"

namespace serried::net {

/// In UCX's tags the sender's rank stands above the caller's kTagBits. An endpoint is made at the first message to or
/// receive from a peer: it is what learns that the peer is lost.
class UcxWire final : public Wire {
 public:
  /// `place`: the address of this host, for errors of peers; may be empty.
  UcxWire(std::shared_ptr<UcxContext> context, int rank, const std::string& place = "");
  ~UcxWire() override;

  const char* name() const override { return "ucx"; }
  std::string address() const override { return address_; }
  void connect(std::vector<std::string> addresses) override;
  void send(Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override;
  void receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) override;
  bool progress() override;
  int descriptor() const override { return bell_.descriptor(); }
  bool arm() override;
  void cancel(Transfer& transfer) override;
  void give_up(int peer, const std::string& why) override;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  struct Peer {
    UcxWire* wire;
    int rank;
    std::string place;    // for people
    std::string address;  // for UCX
    ucp_ep_h endpoint = nullptr;
    std::string lost = {};  // why; empty: it is not
    bool has_sent = false;  // this end, to it
    bool given_up = false;
    bool is_failing = false;  // lost, but what it sent may still be on its way from the kernel
  };
  struct Open {
    void* request = nullptr;
    bool is_send = false;
    uint64_t tag = 0;
    size_t bytes = 0;  // of the memory
  };

  static void on_sent(void* request, ucs_status_t status, void* transfer);
  static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* transfer);
  static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  // All with the mutex held.
  Peer* begin(Transfer& transfer, int peer, uint64_t tag);
  bool connect_to(Peer& peer);
  void started(Transfer& transfer, void* result);
  void finish(Transfer& transfer, const Open& open, ucs_status_t status, size_t came);
  std::string text_of(const Peer& peer, const std::string& why) const;
  void take_back(const std::vector<Transfer*>& receives);
  void end_peer(Peer& peer, const std::string& why);
  void end_failing_peers();
  void close_endpoints(const std::vector<Peer*>& peers);
  void flush(Deadline deadline);
  void end_worker(const std::string& why);
  void wait_for(std::vector<void*>& requests, Deadline deadline);
  std::vector<Transfer*> open_with(int peer) const;
  bool any_open(const std::vector<Transfer*>& transfers) const;
  void progress_until_ended(const std::vector<Transfer*>& transfers);

  const HomeProcess home_;
  const std::shared_ptr<UcxContext> context_;
  const int rank_;
  Doorbell bell_;
  std::string address_;
  std::mutex mutex_;               // guards all below, and UCX's worker
  ucp_worker_h worker_ = nullptr;  // null: ended, see broken_
  std::deque<Peer> peers_;
  std::unordered_map<Transfer*, Open> open_;
  const Transfer* cancelling_ = nullptr;
  bool any_failing_ = false;
  std::string broken_;
};

}  // namespace serried::net
