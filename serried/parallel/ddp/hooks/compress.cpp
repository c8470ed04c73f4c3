// Hooks that send half-precision numbers instead of f32.
#include <utility>

#include <ATen/core/Tensor.h>

#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/steps.h"

namespace serried::hooks {
namespace {

CommHook compress(std::string name, at::ScalarType dtype, CommHook inner) {
  return CommHook(std::move(name), [dtype, inner = std::move(inner)](const Group& group, c10d::GradBucket& bucket) {
    at::Tensor buffer = bucket.getBuffer();
    at::Tensor small = buffer.to(dtype);
    bucket.setBuffer(small);
    const HookFuture reduced = inner(group, bucket);
    bucket.setBuffer(buffer);
    return detail::after(reduced, [buffer](const c10::IValue& value) {
      return buffer.copy_(c10d::detail::parseCppCommHookResult(value));
    });
  });
}

}  // namespace

// The mean divides before it sums, so that a sum of many ranks does not leave the narrow range of f16.
CommHook fp16_compress() {
  return compress("fp16_compress", at::kHalf, allreduce());
}

CommHook bf16_compress() {
  return compress("bf16_compress", at::kBFloat16, allreduce());
}

CommHook fp16_compress(CommHook inner) {
  const std::string name = "fp16_compress_" + inner.name();
  return compress(name, at::kHalf, std::move(inner));
}

CommHook bf16_compress(CommHook inner) {
  const std::string name = "bf16_compress_" + inner.name();
  return compress(name, at::kBFloat16, std::move(inner));
}

}  // namespace serried::hooks
