// Gathers one text per rank through the store; says who is missing when one does not come.
#include "serried/comm/detail/exchange.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/detail/rank_list.h"

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
  raise<c10::DistBackendError>(
      {where,
       c10::str(rank_list(missing), " of ", args.world_size, " did not come within ", args.timeout.count(), " ms"),
       "look at what those ranks are doing; every rank must make the same groups in the same order"});
}

}  // namespace

std::vector<std::string> exchange(const ExchangeArgs& args, std::string_view where, const std::string& key,
                                  const std::string& value) {
  args.store->set(rank_key(key, args.rank), std::vector<uint8_t>(value.begin(), value.end()));
  std::vector<std::string> keys;
  for (int rank = 0; rank < args.world_size; ++rank) keys.push_back(rank_key(key, rank));
  try {
    args.store->wait(keys, args.timeout);
  } catch (const c10::Error&) {
    raise_missing(args, where, key);
  }
  std::vector<std::string> values;
  for (const std::string& name : keys) {
    const std::vector<uint8_t> bytes = args.store->get(name);
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

}  // namespace serried::detail
