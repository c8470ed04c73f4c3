// Whole buffers only: blocks of a model are mostly of a few sizes.
#include "serried/parallel/fsdp/memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "serried/parallel/ddp/bucket.h"
#include "serried/tape/recorder.h"

namespace serried::detail {

at::Tensor BufferPool::find(int64_t num_bytes, const at::TensorOptions& options) {
  // The memory of a large block does not stay with a small one.
  const auto fits = [&](const at::Tensor& buffer) {
    return buffer.numel() >= num_bytes && buffer.numel() <= 2 * num_bytes && buffer.device() == options.device();
  };
  const auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found != free_.end()) {
    at::Tensor buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }
  std::erase_if(free_, [&](const at::Tensor& buffer) { return buffer.numel() > num_bytes; });
  const at::TensorOptions bytes = options.dtype(at::kByte);
  return (group_ ? allocate_for(group_, num_bytes, bytes) : at::empty({num_bytes}, bytes)).zero_();
}

at::Tensor BufferPool::take(int64_t num_elements, const at::TensorOptions& options) {
  const OrdinaryMode ordinary;
  // A graph keeps what it was recorded with, and plans its memory itself.
  if (tape::is_replayed()) return at::empty({num_elements}, options);
  const int64_t num_bytes = num_elements * int64_t(options.dtype().itemsize());
  taken_ += num_bytes;
  peak_ = std::max(peak_, taken_);
  used_.push_back(find(num_bytes, options));
  return used_.back().narrow(0, 0, num_bytes).view(c10::typeMetaToScalarType(options.dtype()));
}

void BufferPool::give_back(at::Tensor buffer) {
  const auto is_it = [&](const at::Tensor& bytes) { return bytes.const_data_ptr() == buffer.const_data_ptr(); };
  const auto found = std::find_if(used_.begin(), used_.end(), is_it);
  if (found == used_.end()) return;  // made for a recording
  taken_ -= int64_t(buffer.nbytes());
  buffer.reset();
  at::Tensor bytes = std::move(*found);
  used_.erase(found);
  if (bytes.storage().use_count() == 1) free_.push_back(std::move(bytes));
}

}  // namespace serried::detail
