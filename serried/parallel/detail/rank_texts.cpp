// Sizes first, then bytes.
#include "serried/parallel/detail/rank_texts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include "serried/comm/collectives.h"

namespace serried::detail {
namespace {

// Shares the memory of `text`.
at::Tensor as_tensor(const std::string& text) {
  return at::from_blob(const_cast<char*>(text.data()), {int64_t(text.size())}, at::kByte);
}

std::vector<int64_t> all_sizes(const std::string& mine, const Group& group) {
  const at::Tensor sizes = all_gather(at::full({1}, int64_t(mine.size()), at::kLong), group);
  const auto* begin = sizes.const_data_ptr<int64_t>();
  return {begin, begin + sizes.numel()};
}

}  // namespace

std::vector<std::string> all_gather_bytes(const std::string& mine, const Group& group) {
  const std::vector<int64_t> sizes = all_sizes(mine, group);
  const at::Tensor bytes = all_gather(as_tensor(mine), group);
  const auto* next = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
  std::vector<std::string> all;
  for (int64_t size : sizes) {
    all.emplace_back(next, size_t(size));
    next += size;
  }
  return all;
}

std::vector<std::string> gather_bytes(const std::string& mine, const Group& group, int to) {
  const std::vector<int64_t> sizes = all_sizes(mine, group);
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

}  // namespace serried::detail
