// Which tensor lies where.
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>

#include "serried/checkpoint/limits.h"
#include "serried/checkpoint/plan.h"

namespace serried::checkpoint::detail {
namespace {

constexpr int64_t kShortestBlock = int64_t(32) << 10;
constexpr int64_t kMaxBlocks = int64_t(1) << 17;  // of 24 bytes each in the index; more where blocks are the longest

int64_t planned_bytes(const PlannedTensor& tensor) {
  return bytes_of(tensor.dtype, tensor.sizes);
}

// Entry by entry, large elements first.
bool goes_before(const PlannedTensor& a, const PlannedTensor& b) {
  if (a.entry != b.entry) return a.entry < b.entry;
  return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
}

// Numbers the files of each tensor within its entry, from 0; returns how many each entry has.
std::map<std::string, size_t> fill_files(std::vector<PlannedTensor>& tensors) {
  std::map<std::string, size_t> counts;
  int64_t filled = 0;
  for (PlannedTensor& tensor : tensors) {
    size_t& count = counts[tensor.entry];
    const int64_t num_bytes = planned_bytes(tensor);
    const bool is_full = filled > 0 && filled + num_bytes > format_limits().file_bytes;
    if (count == 0 || is_full) {
      ++count;
      filled = 0;
    }
    filled += num_bytes;
    tensor.file = count - 1;
  }
  return counts;
}

std::string file_name(const std::string& entry, size_t number, size_t count) {
  char tail[64];
  std::snprintf(tail, sizeof tail, "-%05zu-of-%05zu.safetensors", number + 1, count);
  return entry + tail;
}

}  // namespace

int64_t block_bytes_for(int64_t num_bytes) {
  const int64_t longest = format_limits().block_bytes;
  int64_t block_bytes = kShortestBlock;
  while (block_bytes < longest && num_bytes / block_bytes > kMaxBlocks) block_bytes *= 2;
  return std::min(block_bytes, longest);  // which one replica writes, so that it is whole blocks
}

void lay_out(SavePlan& plan, const std::map<std::string, std::map<std::string, std::string>>& aliases) {
  std::stable_sort(plan.tensors.begin(), plan.tensors.end(), goes_before);
  const std::map<std::string, size_t> counts = fill_files(plan.tensors);
  std::map<std::string, size_t> first;
  for (const auto& [entry, count] : counts) {
    first[entry] = plan.files.size();
    for (size_t i = 0; i < count; ++i) plan.files.push_back({file_name(entry, i, count), entry});
  }
  std::vector<FileHeader> headers(plan.files.size());
  for (PlannedTensor& tensor : plan.tensors) {
    tensor.file += first[tensor.entry];
    FileHeader& header = headers[tensor.file];
    const int64_t begin = header.tensors.empty() ? 0 : header.tensors.back().end;
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.sizes, begin, begin + planned_bytes(tensor)});
    tensor.begin = begin;
  }
  for (size_t i = 0; i < plan.files.size(); ++i) {
    PlannedFile& file = plan.files[i];
    headers[i].metadata = {{"format", "pt"}};  // what Hugging Face's readers ask for
    const auto found = aliases.find(file.entry);
    if (found != aliases.end()) headers[i].metadata.insert(found->second.begin(), found->second.end());
    file.header = header_text(headers[i]);
    file.num_bytes = int64_t(file.header.size()) + headers[i].tensors.back().end;
    plan.index.entries[file.entry].files.push_back(file.name);
  }
  int64_t num_bytes = 0;
  for (const PlannedFile& file : plan.files) num_bytes += file.num_bytes;
  plan.index.block_bytes = block_bytes_for(num_bytes);
  const int64_t leaf_bytes = format_limits().leaf_bytes;
  plan.index.leaf_bytes = plan.index.block_bytes % leaf_bytes == 0 ? leaf_bytes : plan.index.block_bytes;
  for (PlannedTensor& tensor : plan.tensors) tensor.begin += int64_t(plan.files[tensor.file].header.size());
}

}  // namespace serried::checkpoint::detail
