// Changes the data behind tensors that users hold.
#include "serried/parallel/context_parallel/cut_buffers.h"

#include <ATen/ATen.h>

namespace serried::detail {

at::Tensor sequence_part(const at::Tensor& whole, int64_t dim, const SequenceCut& cut, int64_t rank) {
  std::vector<at::Tensor> chunks;
  for (const SequenceChunk& chunk : cut.chunks(rank)) chunks.push_back(whole.narrow(dim, chunk.begin, chunk.size));
  if (chunks.empty()) chunks.push_back(whole.narrow(dim, 0, 0));
  return at::cat(chunks, dim);
}

CutBuffers::~CutBuffers() {
  for (const Restored& each : restored_) each.buffer.set_data(each.whole);
}

void CutBuffers::cut(const at::Tensor& buffer, const at::Tensor& part, bool is_restored) {
  at::Tensor whole = buffer.tensor_data();
  buffer.set_data(part);
  if (is_restored) restored_.push_back({buffer, std::move(whole)});
}

}  // namespace serried::detail
