// How things end before their time: UCX never ends a posted receive by itself, and a send only with its endpoint.
#include <algorithm>

#include "serried/comm/net/transfers.h"
#include "serried/comm/net/ucx/wire.h"

namespace serried::net {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kShortWait = 50ms;  // for what ends in microseconds where it ends at all

}  // namespace

void UcxWire::take_back(const std::vector<Transfer*>& receives) {
  for (Transfer* transfer : receives) {
    const auto found = open_.find(transfer);
    if (found != open_.end() && !found->second.is_send) ucp_request_cancel(worker_, found->second.request);
  }
}

// A message that has come in part keeps the memory of its receive, and UCX waits for the rest of it for ever: then the
// whole worker goes, since nothing less takes the memory back.
void UcxWire::end_peer(Peer& peer, const std::string& why) {
  if (peer.lost.empty()) peer.lost = why;
  peer.is_failing = false;
  const std::vector<Transfer*> theirs = open_with(peer.rank);
  take_back(theirs);
  close_endpoints({&peer});
  progress_until_ended(theirs);
  if (any_open(theirs)) end_worker(lost_text(peer.rank, peer.lost) + ", in the middle of a message");
}

void UcxWire::end_failing_peers() {
  any_failing_ = false;
  for (Peer& peer : peers_) {
    if (peer.is_failing && worker_ != nullptr) end_peer(peer, peer.lost);
  }
}

void UcxWire::close_endpoints(const std::vector<Peer*>& peers) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  std::vector<void*> requests;
  for (Peer* peer : peers) {
    if (peer->endpoint != nullptr)
      requests.push_back(ucp_ep_close_nbx(std::exchange(peer->endpoint, nullptr), &params));
  }
  wait_for(requests, steady_clock::now() + 1s);
}

// Until the peers have what has been sent to them, which they do not acknowledge while they compute.
void UcxWire::flush(Deadline deadline) {
  const auto is_send = [](const auto& entry) { return entry.second.is_send; };
  while (std::any_of(open_.begin(), open_.end(), is_send) && steady_clock::now() < deadline) {
    ucp_worker_progress(worker_);
  }
  const ucp_request_param_t params{};
  std::vector<void*> requests;
  for (const Peer& peer : peers_) {
    if (peer.has_sent && peer.lost.empty()) requests.push_back(ucp_ep_flush_nbx(peer.endpoint, &params));
  }
  wait_for(requests, deadline);
}

void UcxWire::end_worker(const std::string& why) {
  broken_ = why;
  std::vector<Peer*> all;
  for (Peer& peer : peers_) {
    if (peer.lost.empty()) peer.lost = why;
    all.push_back(&peer);
  }
  close_endpoints(all);
  ucp_worker_destroy(worker_);
  worker_ = nullptr;
  any_failing_ = false;
  for (auto& [transfer, open] : open_) {
    transfer == cancelling_ ? end(*transfer, Transfer::State::cancelled, 0) : fail(*transfer, why);
  }
  open_.clear();
  bell_.ring();
}

void UcxWire::wait_for(std::vector<void*>& requests, Deadline deadline) {
  const auto is_over = [](void* request) {
    if (!UCS_PTR_IS_PTR(request)) return true;
    if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
    ucp_request_free(request);
    return true;
  };
  while (std::erase_if(requests, is_over), !requests.empty() && steady_clock::now() < deadline) {
    ucp_worker_progress(worker_);
  }
  for (void* request : requests) ucp_request_free(request);
}

std::vector<Transfer*> UcxWire::open_with(int peer) const {
  std::vector<Transfer*> result;
  for (const auto& [transfer, open] : open_) {
    if (transfer->peer == peer) result.push_back(transfer);
  }
  return result;
}

bool UcxWire::any_open(const std::vector<Transfer*>& transfers) const {
  return std::any_of(transfers.begin(), transfers.end(), [&](Transfer* transfer) { return open_.contains(transfer); });
}

void UcxWire::progress_until_ended(const std::vector<Transfer*>& transfers) {
  const Deadline deadline = steady_clock::now() + kShortWait;
  while (any_open(transfers) && steady_clock::now() < deadline) ucp_worker_progress(worker_);
}

}  // namespace serried::net
