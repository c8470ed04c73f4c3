// Through a store each rank has a key of its own; through a group sizes go first, then bytes.
#include "serried/comm/agree/rank_texts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/door.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string rank_key(const std::string& key, int rank) {
  return c10::str(key, "/", rank);
}

std::string text_under(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

[[noreturn]] void raise_missing(const StoreRanks& ranks, std::string_view where, const std::vector<int>& missing) {
  const std::string place = place_of(ranks.store);
  raise<c10::DistBackendError>(
      {where,
       c10::str(rank_list(missing), " of ", ranks.world_size, " did not come ",
                place.empty() ? "" : "to the rendezvous at " + place + " ", "within ", ranks.timeout.count(), " ms"),
       "look at what those ranks are doing; every rank must make the same groups in the same order"});
}

// Until all of `senders` have written their key. Where they have not, nobody waits for the late at exit.
void wait_for(const StoreRanks& ranks, std::string_view where, const std::string& key,
              const std::vector<int>& senders) {
  std::vector<std::string> keys;
  for (int rank : senders) keys.push_back(rank_key(key, rank));
  try {
    return ranks.store->wait(keys, ranks.timeout);
  } catch (const c10::DistNetworkError& error) {
    if (error.msg().starts_with('[')) throw;  // of the launcher, which says so
    raise<c10::DistBackendError>(
        {where,
         c10::str("the store at ", place_of(ranks.store), " is gone: the process that served it, rank 0's, has ended"),
         "see what rank 0 says; it may have waited for this rank and given up"});
  } catch (const c10::Error&) {  // a timeout: who is missing is looked up below
  }
  std::vector<int> missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!ranks.store->check({keys[i]})) missing.push_back(senders[i]);
  }
  if (missing.empty()) return;
  abandon(ranks.store);
  raise_missing(ranks, where, missing);
}

// Shares the memory of `text`.
at::Tensor as_tensor(const std::string& text) {
  return at::from_blob(const_cast<char*>(text.data()), {int64_t(text.size())}, at::kByte);
}

std::vector<int64_t> all_gather_number(int64_t mine, const Group& group, std::optional<milliseconds> timeout = {}) {
  const at::Device device = device_of(group);
  const at::Tensor all =
      all_gather(at::full({1}, mine, at::device(device).dtype(at::kLong)), group, {.timeout = timeout}).cpu();
  const auto* begin = all.const_data_ptr<int64_t>();
  return {begin, begin + all.numel()};
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

LineDifference compare(const std::string& first_text, const std::string& other_text, int rank) {
  const std::vector<std::string> first = split_lines(first_text), other = split_lines(other_text);
  size_t i = 0;
  while (i < std::min(first.size(), other.size()) && first[i] == other[i]) ++i;
  const auto line = [&](const std::vector<std::string>& lines) {
    return i < lines.size() ? std::optional(lines[i]) : std::nullopt;
  };
  return {i, rank, line(first), line(other), first.size(), other.size()};
}

}  // namespace

std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    text += text.empty() ? "" : ", ";
    text += end - i < 3 ? c10::str(ranks[i]) : c10::str(ranks[i], "-", ranks[end - 1]);
    i = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

void tell(const StoreRanks& ranks, const std::string& key, const std::string& text) {
  ranks.store->set(rank_key(key, ranks.rank), std::vector<uint8_t>(text.begin(), text.end()));
}

std::string listen_to(const StoreRanks& ranks, std::string_view where, const std::string& key, int rank) {
  wait_for(ranks, where, key, {rank});
  return text_under(*ranks.store, rank_key(key, rank));
}

std::vector<std::string> exchange(const StoreRanks& ranks, std::string_view where, const std::string& key,
                                  const std::string& mine) {
  tell(ranks, key, mine);
  std::vector<int> all(size_t(ranks.world_size));
  std::iota(all.begin(), all.end(), 0);
  wait_for(ranks, where, key, all);
  std::vector<std::string> texts;
  for (int rank : all) texts.push_back(text_under(*ranks.store, rank_key(key, rank)));
  return texts;
}

std::string first_text(c10d::Store& store, const std::string& key, const std::string& mine) {
  const std::vector<uint8_t> text =
      store.compareSet(key, std::vector<uint8_t>{}, std::vector<uint8_t>(mine.begin(), mine.end()));
  return {text.begin(), text.end()};
}

void agree(c10d::Store& store, const std::string& key, std::string_view where, const std::string& mine) {
  const std::string other = first_text(store, key, mine);
  if (other == mine) return;
  raise<c10::ValueError>({where, c10::str("this rank passes ", mine, ", another rank passed ", other),
                          "make the same groups in the same order on every rank"});
}

RankLog::RankLog(const Group& group, std::string prefix)
    : rank_(group->getRank()), store_(group->getStore()), prefix_(std::move(prefix)) {}

void RankLog::add(const std::string& text) {
  const std::string mine = rank_key(prefix_, rank_);
  const int64_t index = store_->add(mine + "/count", 1) - 1;
  store_->set(c10::str(mine, "/", index), text);
}

std::optional<std::string> RankLog::read(int rank, int64_t index, steady_clock::time_point deadline) const {
  const std::string key = c10::str(rank_key(prefix_, rank), "/", index);
  const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
  try {
    store_->wait({key}, std::max(left, milliseconds(1)));
  } catch (const c10::DistStoreError&) {
    if (steady_clock::now() < deadline) throw;
    return std::nullopt;
  }
  return text_under(*store_, key);
}

std::vector<std::string> all_gather_bytes(const std::string& mine, const Group& group,
                                          std::optional<milliseconds> timeout) {
  const std::vector<int64_t> sizes = all_gather_number(int64_t(mine.size()), group, timeout);
  const at::Device device = device_of(group);
  const at::Tensor bytes = all_gather(as_tensor(mine).to(device), group, {.timeout = timeout}).cpu();
  const auto* next = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
  std::vector<std::string> all;
  for (int64_t size : sizes) {
    all.emplace_back(next, size_t(size));
    next += size;
  }
  return all;
}

std::vector<std::string> gather_bytes(const std::string& mine, const Group& group, int to) {
  const std::vector<int64_t> sizes = all_gather_number(int64_t(mine.size()), group);
  if (group->getRank() != to) {
    send(as_tensor(mine), group, {.peer = to});
    return {};
  }
  std::vector<std::string> all;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    all.push_back(rank == to ? mine : std::string(size_t(sizes[size_t(rank)]), '\0'));
    if (rank != to) recv(as_tensor(all.back()), group, {.peer = rank});
  }
  return all;
}

std::string broadcast_bytes(const std::string& mine, const Group& group, const BroadcastOptions& options) {
  const at::Device device = device_of(group);
  const at::Tensor size = at::full({1}, int64_t(mine.size()), at::device(device).dtype(at::kLong));
  broadcast_(size, group, options);
  std::string text = mine;
  text.resize(size_t(size.cpu().item<int64_t>()));
  const at::Tensor bytes = as_tensor(text).to(device);
  broadcast_(bytes, group, options);
  as_tensor(text).copy_(bytes);
  return text;
}

std::optional<LineDifference> first_difference(const std::string& mine, const Group& group) {
  const std::vector<int64_t> hashes = all_gather_number(int64_t(std::hash<std::string>{}(mine)), group);
  if (std::all_of(hashes.begin(), hashes.end(), [&](int64_t hash) { return hash == hashes[0]; })) return std::nullopt;
  const std::vector<std::string> all = all_gather_bytes(mine, group);
  const auto other = std::find_if(all.begin(), all.end(), [&](const std::string& text) { return text != all[0]; });
  return compare(all[0], *other, int(other - all.begin()));
}

}  // namespace serried::detail
