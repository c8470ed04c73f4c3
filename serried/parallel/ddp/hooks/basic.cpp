// Hooks without compression, their composition, and hooks by name.
#include "serried/parallel/ddp/hooks/hooks.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "serried/base/error.h"
#include "serried/parallel/ddp/hooks/steps.h"

namespace serried::hooks {

CommHook allreduce() {
  return CommHook("allreduce", [](const Group& group, c10d::GradBucket& bucket) {
    return detail::average(group, bucket.getBuffer());
  });
}

CommHook noop() {
  return CommHook("noop", [](const Group&, c10d::GradBucket& bucket) { return detail::ready(bucket.getBuffer()); });
}

CommHook then(CommHook hook, std::function<void(const c10d::GradBucket&)> after) {
  const std::string name = c10::str(hook.name(), "_then");
  return CommHook(name,
                  [hook = std::move(hook), after = std::move(after)](const Group& group, c10d::GradBucket& bucket) {
                    const HookFuture reduced = hook(group, bucket);
                    // The caller's bucket ends with this call.
                    return detail::after(reduced, [bucket, after](const c10::IValue& value) {
                      at::Tensor result = c10d::detail::parseCppCommHookResult(value);
                      c10d::GradBucket filled = bucket;
                      filled.setBuffer(result);
                      after(filled);
                      return result;
                    });
                  });
}

CommHook make(CommHookType type) {
  switch (type) {
    case CommHookType::ALLREDUCE: return allreduce();
    case CommHookType::FP16_COMPRESS: return fp16_compress();
    case CommHookType::BF16_COMPRESS: return bf16_compress();
    case CommHookType::QUANTIZE_PER_TENSOR: return quantize_per_tensor();
    case CommHookType::QUANTIZE_PER_CHANNEL: return quantize_per_channel();
    case CommHookType::POWER_SGD: return power_sgd();
    case CommHookType::POWER_SGD_RANK2: return power_sgd({.rank = 2});
    case CommHookType::BATCHED_POWER_SGD: return batched_power_sgd();
    case CommHookType::BATCHED_POWER_SGD_RANK2: return batched_power_sgd({.rank = 2});
    case CommHookType::NOOP: return noop();
  }
  raise<c10::ValueError>(
      {"make", c10::str("no hook has the number ", int(type)), "pass one of the names of CommHookType"});
}

}  // namespace serried::hooks
