// Gathers one text per rank through the store; says who is missing when one does not come.
#include "serried/comm/agree/exchange.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/groups/rank_list.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {
namespace {

std::string rank_key(const std::string& key, int rank) {
  return c10::str(key, "/", rank);
}

[[noreturn]] void raise_missing(const ExchangeArgs& args, std::string_view where, const std::string& key) {
  std::vector<int> missing;
  for (int rank = 0; rank < args.world_size; ++rank) {
    if (!args.store->check({rank_key(key, rank)})) missing.push_back(rank);
  }
  const std::string place = place_of(args.store);
  raise<c10::DistBackendError>(
      {where,
       c10::str(rank_list(missing), " of ", args.world_size, " did not come ",
                place.empty() ? "" : "to the rendezvous at " + place + " ", "within ", args.timeout.count(), " ms"),
       "look at what those ranks are doing; every rank must make the same groups in the same order"});
}

}  // namespace

bool wait_for_keys(const c10::intrusive_ptr<c10d::Store>& store, std::string_view where,
                   const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  try {
    store->wait(keys, timeout);
    return true;
  } catch (const c10::DistNetworkError&) {
    raise<c10::DistBackendError>(
        {where, c10::str("the store at ", place_of(store), " is gone: the process that served it, rank 0's, has ended"),
         "see what rank 0 says; it may have waited for this rank and given up"});
  } catch (const c10::Error&) {
    abandon(store);
    return false;
  }
}

std::vector<std::string> exchange(const ExchangeArgs& args, std::string_view where, const std::string& key,
                                  const std::string& value) {
  args.store->set(rank_key(key, args.rank), std::vector<uint8_t>(value.begin(), value.end()));
  std::vector<std::string> keys;
  for (int rank = 0; rank < args.world_size; ++rank) keys.push_back(rank_key(key, rank));
  if (!wait_for_keys(args.store, where, keys, args.timeout)) raise_missing(args, where, key);
  std::vector<std::string> values;
  for (const std::string& name : keys) {
    const std::vector<uint8_t> bytes = args.store->get(name);
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

}  // namespace serried::detail
