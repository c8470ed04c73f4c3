// Hooks that send gradients as 8-bit codes with a scale and a zero point per run of elements.
#include <limits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/steps.h"

namespace serried::hooks {
namespace {

constexpr int64_t kLargestCode = 255;
constexpr int64_t kFloatBytes = sizeof(float);

int64_t rounded_up(int64_t size, int64_t step) {
  return (size + step - 1) / step * step;
}

// One rank's bytes: scales, zero points, codes. Views of `bytes`, so that one collective carries all of it.
struct Message {
  static int64_t num_bytes(int64_t rows, int64_t cols) {
    return 2 * rows * kFloatBytes + rounded_up(rows * cols, kFloatBytes);
  }

  Message(const at::Tensor& bytes, int64_t rows, int64_t cols)
      : scales(bytes.narrow(0, 0, rows * kFloatBytes).view(at::kFloat).view({rows, 1})),
        zero_points(bytes.narrow(0, rows * kFloatBytes, rows * kFloatBytes).view(at::kFloat).view({rows, 1})),
        codes(bytes.narrow(0, 2 * rows * kFloatBytes, rows * cols).view({rows, cols})) {}

  // The range always has 0 in it, so that 0 stays exactly 0. A range that is no number makes the whole row none.
  void encode(const at::Tensor& values) const {
    const auto [smallest, largest] = at::aminmax(values, /*dim=*/1, /*keepdim=*/true);
    const at::Tensor low = smallest.clamp_max(0);
    // torch.ao's observers stop at an epsilon of 1.2e-7, which would round small gradients to 0.
    scales.copy_(((largest.clamp_min(0) - low) / kLargestCode).clamp_min(std::numeric_limits<float>::min()));
    zero_points.copy_((low / scales).round().neg().clamp(0, kLargestCode));
    codes.copy_(((values / scales).round() + zero_points).clamp(0, kLargestCode));
  }

  at::Tensor decode() const { return (codes.to(at::kFloat) - zero_points) * scales; }

  at::Tensor scales;
  at::Tensor zero_points;
  at::Tensor codes;
};

void check_dense(const char* hook, const at::Tensor& buffer) {
  if (buffer.layout() == at::kStrided && at::isFloatingType(buffer.scalar_type())) return;
  raise<c10::ValueError>({hook, c10::str("cannot quantise a bucket of ", buffer.layout(), " ", buffer.scalar_type()),
                          "register hooks::allreduce(), or keep such parameters out of the module"});
}

// The mean of what every rank sent, computed alike on each.
at::Tensor mean_of(const at::Tensor& gathered, int64_t rows, int64_t cols) {
  at::Tensor sum = at::zeros({rows, cols}, gathered.options().dtype(at::kFloat));
  for (const at::Tensor& bytes : gathered.unbind(0)) sum.add_(Message(bytes, rows, cols).decode());
  return sum.div_(gathered.size(0)).view(-1);
}

HookFuture quantized_mean(const char* hook, const Group& group, const at::Tensor& buffer, int64_t row_size) {
  check_dense(hook, buffer);
  if (buffer.numel() == 0) return detail::ready(buffer);
  const int64_t cols = row_size;
  const int64_t rows = rounded_up(buffer.numel(), cols) / cols;
  const at::Tensor padded = at::constant_pad_nd(buffer.to(at::kFloat), {0, rows * cols - buffer.numel()});
  const int64_t num_bytes = Message::num_bytes(rows, cols);
  at::Tensor mine = at::zeros({num_bytes}, buffer.options().dtype(at::kByte));
  Message(mine, rows, cols).encode(padded.view({rows, cols}));
  at::Tensor gathered = at::empty({group->getSize(), num_bytes}, mine.options());
  const HookFuture sent = group->all_gather_single(gathered, mine)->getFuture();
  return detail::after(sent, [buffer, gathered, mine, rows, cols](const c10::IValue&) {
    return buffer.copy_(mean_of(gathered, rows, cols).narrow(0, 0, buffer.numel()));
  });
}

}  // namespace

CommHook quantize_per_tensor() {
  return CommHook("quantize_per_tensor", [](const Group& group, c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    return quantized_mean("quantize_per_tensor", group, buffer, buffer.numel());
  });
}

CommHook quantize_per_channel(QuantizePerChannelOptions options) {
  if (options.bucket_size < 1) {
    raise<c10::ValueError>({"quantize_per_channel", c10::str("bucket_size is ", options.bucket_size),
                            "pass how many elements share a scale: 1 or more"});
  }
  return CommHook("quantize_per_channel", [size = options.bucket_size](const Group& group, c10d::GradBucket& bucket) {
    return quantized_mean("quantize_per_channel", group, bucket.getBuffer(), size);
  });
}

}  // namespace serried::hooks
