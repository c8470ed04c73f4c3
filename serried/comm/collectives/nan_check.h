// Looks for NaN in what a rank is about to send.
#pragma once

#include "serried/comm/collectives/watch.h"

#include <ATen/core/Tensor.h>

namespace serried::detail {

/// SERRIED_NAN_CHECK: the mode that new groups start with.
watch::NanCheck default_nan_check();

/// The sentence about the first NaN of `sent`, empty where there is none. Integers have none.
///     rank 2 sends 3 NaN in f32[4,5], the first at [1,2]
std::string find_nan(const at::Tensor& sent, int rank);

inline constexpr const char* kNanFix =
    "look for the first step at which this value is NaN on the rank named; SERRIED_NAN_CHECK=off sends it unchecked";

/// Warns, or raises a ValueError, if `sent` holds a NaN; `op` is the call it stands in.
void check_nan(watch::NanCheck mode, const at::Tensor& sent, const char* op, int rank);

}  // namespace serried::detail
