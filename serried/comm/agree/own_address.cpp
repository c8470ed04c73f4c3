// The way to the store is the way to the others.
#include "serried/comm/agree/own_address.h"

#include <algorithm>

#include "serried/comm/agree/host.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {

std::string own_address(const StoreRanks& ranks) {
  const std::string mine = address_towards_store(ranks.store);
  const std::vector<std::string> all = exchange(ranks, "new_group", "address", mine);
  if (mine.empty() || !is_loopback(mine)) return mine;
  const auto elsewhere = std::find_if(
      all.begin(), all.end(), [](const std::string& address) { return !address.empty() && !is_loopback(address); });
  return elsewhere == all.end() ? "127.0.0.1" : address_towards(*elsewhere);
}

}  // namespace serried::detail
