// Gradients of the whole batch where ranks have shares of different sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/comm/groups/group.h"

namespace serried {

/// `loss` times local_count * ranks / sum of all ranks' counts. `loss` is this rank's mean over `local_count` samples
/// (or tokens: whatever the mean runs over). Backward through a DistributedDataParallel then gives the gradients of the
/// mean over all samples of all ranks, and the average of the results over the ranks is that mean. Every rank calls it;
/// one all-reduce of eight bytes. A rank without samples passes 0 and the loss of its empty batch, though that is NaN.
///     auto loss = scale_loss(torch::mse_loss(ddp(x), y), x.size(0), world);
at::Tensor scale_loss(const at::Tensor& loss, int64_t local_count, const Group& group);

}  // namespace serried
