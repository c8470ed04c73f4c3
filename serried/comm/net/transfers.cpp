// The state of a Transfer is read by its owner while another thread may end it.
#include "serried/comm/net/transfers.h"

#include <atomic>
#include <utility>

#include <c10/util/StringUtil.h>

namespace serried::net {

void begin(Transfer& transfer, int peer) {
  transfer.bytes = 0;
  transfer.peer = peer;
  transfer.handle = nullptr;
  transfer.error.clear();
  std::atomic_ref(transfer.state).store(Transfer::State::under_way, std::memory_order_relaxed);
}

void end(Transfer& transfer, Transfer::State state, size_t bytes, std::string error) {
  transfer.bytes = bytes;
  transfer.handle = nullptr;
  transfer.error = std::move(error);
  std::atomic_ref(transfer.state).store(state, std::memory_order_release);
}

void fail(Transfer& transfer, std::string error) {
  end(transfer, Transfer::State::failed, 0, std::move(error));
}

bool begin_tagged(Transfer& transfer, int peer, uint64_t tag) {
  begin(transfer, peer);
  if (tag >> kTagBits == 0) return true;
  fail(transfer, c10::str("tag ", tag, " has more than ", kTagBits, " bits"));
  return false;
}

std::string lost_text(int peer, const std::string& why) {
  return c10::str("rank ", peer, " is lost: ", why);
}

std::string no_rank_text(int peer, int num_peers) {
  return c10::str("there is no rank ", peer, " among ", num_peers);
}

std::string truncated_text(int peer, uint64_t tag, size_t came, size_t expected) {
  return c10::str("a message of ", came, " bytes came from rank ", peer, " where ", expected, " were expected (tag ",
                  tag, ")");
}

}  // namespace serried::net
