// Batch normalisation in training mode over the ranks of a group, with its gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/comm/groups/group.h"

namespace serried::detail {

/// What at::batch_norm takes besides its input; tensors may be undefined.
struct BatchNormArguments {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated if running_var is defined too
  at::Tensor running_var;
  double momentum = 0.1;
  double eps = 1e-5;
};

/// `input` normalised by the statistics of all ranks' inputs. One collective here and one in backward.
at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormArguments& arguments, const Group& group);

}  // namespace serried::detail
