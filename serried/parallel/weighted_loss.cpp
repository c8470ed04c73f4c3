// One count per rank, added up.
#include "serried/parallel/weighted_loss.h"

#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"

namespace serried {

at::Tensor scale_loss(const at::Tensor& loss, int64_t local_count, const Group& group) {
  if (local_count < 0) {
    raise<c10::ValueError>({"scale_loss", c10::str("local_count is ", local_count),
                            "pass how many samples the loss is a mean of, 0 if there are none"});
  }
  const at::Tensor total = at::full({1}, local_count, at::kLong);
  all_reduce_(total, group);
  const int64_t total_count = *total.const_data_ptr<int64_t>();
  if (total_count == 0) {
    raise<c10::ValueError>({"scale_loss", "no rank has any samples", "end the loop when no rank has data left"});
  }
  // The mean of nothing is NaN; its gradients are sums over nothing, zeros, once NaN is out of the way.
  if (local_count == 0) return at::nan_to_num(loss) * 0;
  return loss * (double(local_count) * group->getSize() / double(total_count));
}

}  // namespace serried
