// From a Transfer to UCX's request and back.
#include "serried/comm/net/ucx/wire.h"

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/net/transfers.h"

namespace serried::net {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kMaxRanks = 1 << (64 - kTagBits);

uint64_t full_tag(int sender, uint64_t tag) {
  return uint64_t(sender) << kTagBits | tag;
}

}  // namespace

UcxWire::UcxWire(std::shared_ptr<UcxContext> context, int rank, const std::string& place)
    : context_(std::move(context)), rank_(rank) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check_ucx(ucp_worker_create(context_->get(), &params, &worker_), "a worker");
  try {
    int descriptor = -1;
    check_ucx(ucp_worker_get_efd(worker_, &descriptor), "a descriptor to wait on");
    bell_.add(descriptor);
    ucp_address_t* address = nullptr;
    size_t length = 0;
    check_ucx(ucp_worker_get_address(worker_, &address, &length), "the worker's address");
    address_ = place + ' ' + std::string(reinterpret_cast<const char*>(address), length);
    ucp_worker_release_address(worker_, address);
  } catch (...) {
    ucp_worker_destroy(worker_);
    throw;
  }
}

UcxWire::~UcxWire() {
  if (!home_.is_here()) return;  // worker and connections are the parent's
  const std::scoped_lock lock(mutex_);
  if (worker_ == nullptr) return;
  flush(steady_clock::now() + 1s);
  end_worker("this end of the wire is gone");
}

void UcxWire::connect(std::vector<std::string> addresses) {
  const std::scoped_lock lock(mutex_);
  if (addresses.size() > size_t(kMaxRanks)) {
    raise<c10::ValueError>(
        {"new_group", c10::str(addresses.size(), " ranks are more than the ", kMaxRanks, " that fit into UCX's tags"),
         "use several groups"});
  }
  for (std::string& address : addresses) {
    const size_t end = std::min(address.find(' '), address.size());
    peers_.push_back({.wire = this,
                      .rank = int(peers_.size()),
                      .place = address.substr(0, end),
                      .address = address.substr(std::min(end + 1, address.size()))});
    if (peers_.back().address.empty()) peers_.back().lost = "it has given no address";
  }
}

void UcxWire::send(Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  Peer* target = begin(transfer, peer, tag);
  if (target == nullptr) return;
  if (!connect_to(*target)) return fail(transfer, lost_text(peer, target->lost));
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send = on_sent;
  params.user_data = &transfer;
  target->has_sent = true;
  open_[&transfer] = {.is_send = true, .tag = tag, .bytes = bytes};
  started(transfer, ucp_tag_send_nbx(target->endpoint, data, bytes, full_tag(rank_, tag), &params));
}

void UcxWire::receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  Peer* source = begin(transfer, peer, tag);
  if (source == nullptr) return;
  if (source->given_up) return fail(transfer, lost_text(peer, source->lost));
  connect_to(*source);
  ucp_request_param_t params{};
  // Only the callback says how much has come.
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.recv = on_received;
  params.user_data = &transfer;
  open_[&transfer] = {.is_send = false, .tag = tag, .bytes = bytes};
  void* result = ucp_tag_recv_nbx(worker_, data, bytes, full_tag(peer, tag), ~uint64_t(0), &params);
  started(transfer, result);
  // What it sent before it was lost has arrived by now.
  if (!source->lost.empty() && !source->is_failing) take_back({&transfer});
}

bool UcxWire::progress() {
  constexpr int kMany = 64;  // a steady stream must not keep the caller here
  const std::scoped_lock lock(mutex_);
  bool any = bell_.answer();
  for (int i = 0; worker_ != nullptr && i < kMany; ++i) {
    if (ucp_worker_progress(worker_) != 0) {
      any = true;
      continue;
    }
    if (!any_failing_) break;
    end_failing_peers();
    any = true;
  }
  return any;
}

bool UcxWire::arm() {
  const std::scoped_lock lock(mutex_);
  if (bell_.is_rung() || any_failing_) return false;
  return worker_ == nullptr || ucp_worker_arm(worker_) == UCS_OK;
}

void UcxWire::cancel(Transfer& transfer) {
  const std::scoped_lock lock(mutex_);
  if (transfer.ended()) return;
  cancelling_ = &transfer;
  take_back({&transfer});
  progress_until_ended({&transfer});
  if (!transfer.ended()) end_peer(peers_[size_t(transfer.peer)], "a message was cancelled in the middle");
  cancelling_ = nullptr;
}

void UcxWire::give_up(int peer, const std::string& why) {
  const std::scoped_lock lock(mutex_);
  if (worker_ == nullptr || peer < 0 || peer >= int(peers_.size())) return;
  Peer& lost = peers_[size_t(peer)];
  lost.given_up = true;
  end_peer(lost, why);
  bell_.ring();
}

void UcxWire::on_sent(void* request, ucs_status_t status, void* data) {
  auto& transfer = *static_cast<Transfer*>(data);
  auto& wire = *static_cast<UcxWire*>(transfer.handle);
  const Open open = wire.open_.extract(&transfer).mapped();
  wire.finish(transfer, open, status, open.bytes);
  ucp_request_free(request);
}

void UcxWire::on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* data) {
  auto& transfer = *static_cast<Transfer*>(data);
  auto& wire = *static_cast<UcxWire*>(transfer.handle);
  const Open open = wire.open_.extract(&transfer).mapped();
  wire.finish(transfer, open, status, info->length);
  ucp_request_free(request);
}

// The endpoint is closed later: what the peer has sent comes first.
void UcxWire::on_error(void* data, ucp_ep_h endpoint, ucs_status_t status) {
  auto& peer = *static_cast<Peer*>(data);
  if (peer.lost.empty()) peer.lost = peer.wire->text_of(peer, ucs_status_string(status));
  peer.is_failing = true;
  peer.wire->any_failing_ = true;
}

// Null: the transfer has ended.
UcxWire::Peer* UcxWire::begin(Transfer& transfer, int peer, uint64_t tag) {
  if (!begin_tagged(transfer, peer, tag)) return nullptr;
  if (worker_ == nullptr) {
    fail(transfer, broken_);
    return nullptr;
  }
  if (peer < 0 || peer >= int(peers_.size())) {
    fail(transfer, no_rank_text(peer, int(peers_.size())));
    return nullptr;
  }
  transfer.handle = this;
  return &peers_[size_t(peer)];
}

// False where the peer is lost.
bool UcxWire::connect_to(Peer& peer) {
  if (!peer.lost.empty()) return false;
  if (peer.endpoint != nullptr) return true;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = on_error, .arg = &peer};
  const ucs_status_t status = ucp_ep_create(worker_, &params, &peer.endpoint);
  if (status == UCS_OK) return true;
  peer.endpoint = nullptr;
  peer.lost = text_of(peer, c10::str("there is no way to it: ", ucs_status_string(status)));
  return false;
}

std::string UcxWire::text_of(const Peer& peer, const std::string& why) const {
  return peer.place.empty() ? why : c10::str(why, " (from rank ", rank_, " to ", peer.place, ")");
}

// After the call that started it, which may have ended it by its callback.
void UcxWire::started(Transfer& transfer, void* result) {
  const auto found = open_.find(&transfer);
  if (found == open_.end()) return;
  if (UCS_PTR_IS_PTR(result)) {
    found->second.request = result;
    return;
  }
  const Open open = open_.extract(found).mapped();
  finish(transfer, open, UCS_PTR_STATUS(result), open.bytes);
}

void UcxWire::finish(Transfer& transfer, const Open& open, ucs_status_t status, size_t came) {
  if (status == UCS_OK) return end(transfer, Transfer::State::done, came);
  if (status == UCS_ERR_MESSAGE_TRUNCATED) {
    return fail(transfer, truncated_text(transfer.peer, open.tag, came, open.bytes));
  }
  if (&transfer == cancelling_) return end(transfer, Transfer::State::cancelled, 0);
  const Peer& peer = peers_[size_t(transfer.peer)];
  fail(transfer, lost_text(peer.rank, peer.lost.empty() ? ucs_status_string(status) : peer.lost));
}

}  // namespace serried::net
