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

namespace {

// Autograd has saved the tensor itself: it is told that it would find other data there, or it would compute with them.
void give_data(const at::Tensor& t, const at::Tensor& data) {
  t.set_data(data);
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

CutBuffers::~CutBuffers() {
  for (const Restored& each : restored_) give_data(each.buffer, each.whole);
}

void CutBuffers::cut(const at::Tensor& buffer, const at::Tensor& part, bool is_restored) {
  at::Tensor whole = buffer.tensor_data();
  give_data(buffer, part);
  if (is_restored) restored_.push_back({buffer, std::move(whole)});
}

}  // namespace serried::detail
