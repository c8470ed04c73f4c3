// Sizes first, then bytes.
#include "serried/comm/agree/rank_texts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>

#include "serried/comm/collectives/collectives.h"

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

std::optional<LineDifference> first_difference(const std::string& mine, const Group& group) {
  const auto hash = int64_t(std::hash<std::string>{}(mine));
  const at::Tensor hashes = all_gather(at::full({1}, hash, at::kLong), group);
  const auto* begin = hashes.const_data_ptr<int64_t>();
  if (std::all_of(begin, begin + hashes.numel(), [&](int64_t other) { return other == *begin; })) return std::nullopt;
  const std::vector<std::string> all = all_gather_bytes(mine, group);
  const auto other = std::find_if(all.begin(), all.end(), [&](const std::string& text) { return text != all[0]; });
  return compare(all[0], *other, int(other - all.begin()));
}

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
