// Copies rows of parts; while the thread is recorded, as the ops serried::pack_ and serried::unpack_.
#include "serried/tensor/redistribute/packing.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstring>

#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

constexpr int64_t kSmallest = int64_t(64) << 10;  // below that the allocator keeps the block itself
constexpr int64_t kLargest = int64_t(32) << 20;   // above that the copy dwarfs the faults, and keeping it is waste

struct KeptMemory {
  c10::DataPtr memory;
  int64_t bytes = 0;
};

// A contiguous tensor seen as rows of parts: [rows, parts, bytes].
struct Rows {
  int64_t rows = 1;
  int64_t parts;
  int64_t bytes;  // of one part in one row

  Rows(const at::Tensor& x, int64_t dim, int64_t parts_) : parts(parts_) {
    for (int64_t d = 0; d < dim; ++d) rows *= x.size(d);
    bytes = rows == 0 ? 0 : x.numel() / rows / parts * int64_t(x.element_size());
  }
  // Below that ATen's copy spends longer on preparing than on copying.
  bool is_small(const at::Tensor& x) const { return x.is_cpu() && rows * parts * bytes <= 64 << 10; }

  // Calls visit(place in the rows, place in the parts). What is empty has no memory to be copied.
  template <class Visit>
  void each(Visit visit) const {
    if (bytes == 0) return;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t row = 0; row < rows; ++row) visit((row * parts + part) * bytes, (part * rows + row) * bytes);
    }
  }
};

// x with dim cut into `parts`, the parts in front: [parts, ..., size / parts, ...]. A view.
at::Tensor parts_in_front(const at::Tensor& x, int64_t dim, int64_t parts) {
  c10::DimVector sizes(x.sizes().begin(), x.sizes().end());
  c10::DimVector strides(x.strides().begin(), x.strides().end());
  sizes[dim] /= parts;
  strides.insert(strides.begin(), strides[dim] * sizes[dim]);
  sizes.insert(sizes.begin(), parts);
  return x.as_strided(sizes, strides);
}

void pack_(const at::Tensor& buffer, const at::Tensor& x, int64_t dim, int64_t parts) {
  const Rows rows(x, dim, parts);
  if (!rows.is_small(x)) {
    buffer.copy_(parts_in_front(x, dim, parts));
    return;
  }
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(buffer.mutable_data_ptr());
  rows.each([&](int64_t in_row, int64_t in_parts) { std::memcpy(to + in_parts, from + in_row, size_t(rows.bytes)); });
}

void unpack_(const at::Tensor& x, const at::Tensor& buffer, int64_t dim, int64_t parts) {
  const Rows rows(x, dim, parts);
  if (!rows.is_small(x)) {
    const at::Tensor view = parts_in_front(x, dim, parts);
    view.copy_(buffer.view(view.sizes()));
    return;
  }
  const char* from = static_cast<const char*>(buffer.const_data_ptr());
  char* to = static_cast<char*>(x.mutable_data_ptr());
  rows.each([&](int64_t in_row, int64_t in_parts) { std::memcpy(to + in_row, from + in_parts, size_t(rows.bytes)); });
}

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("pack_(Tensor(a!) buffer, Tensor x, int dim, int parts) -> ()");
  m.def("unpack_(Tensor(a!) x, Tensor buffer, int dim, int parts) -> ()");
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("pack_", pack_);
  m.impl("unpack_", unpack_);
}

void call_packing(const char* op, const at::Tensor& to, const at::Tensor& from, int64_t dim, int64_t parts) {
  torch::jit::Stack stack;
  torch::jit::push(stack, to, from, dim, parts);
  tape::run(c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), stack);
}

}  // namespace

at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(options.dtype().itemsize());
  if (!options.device().is_cpu() || bytes < kSmallest || bytes > kLargest) return at::empty(sizes, options);
  // A recorder must see where the memory comes from.
  if (tape::is_recording()) return at::empty(sizes, options);
  thread_local KeptMemory kept;
  if (kept.bytes < bytes) {
    kept = {};  // first give back, so that both never live together
    kept = {c10::GetCPUAllocator()->allocate(size_t(bytes)), bytes};
  }
  return at::from_blob(kept.memory.get(), sizes, options);
}

at::Tensor own_memory(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

at::Tensor packed(const at::Tensor& x, int64_t dim, int64_t parts, Memory memory) {
  c10::DimVector sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] /= parts;
  sizes.insert(sizes.begin(), parts);
  at::Tensor buffer = memory(sizes, x.options());
  if (!tape::is_recording()) {
    pack_(buffer, x, dim, parts);
  } else {
    call_packing("serried::pack_", buffer, x, dim, parts);
  }
  return buffer;
}

void unpack(const at::Tensor& x, int64_t dim, int64_t parts, const at::Tensor& buffer) {
  if (!tape::is_recording()) return unpack_(x, buffer, dim, parts);
  call_packing("serried::unpack_", x, buffer, dim, parts);
}

}  // namespace serried::detail
