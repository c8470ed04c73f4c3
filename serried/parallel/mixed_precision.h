// Mixed precision, as data parallel strategies take it.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

#include "serried/base/error.h"

namespace serried {

/// Dtypes that forward and backward (param), the collectives (reduce) and buffers run in; none: as they are. Only
/// floating tensors are cast. Parameters, gradients and the optimizer stay in full precision outside.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};  // none: param_dtype
  std::optional<at::ScalarType> buffer_dtype = {};
  std::optional<at::ScalarType> output_dtype = {};  // NotImplementedError: no module can be told to cast its output
  bool cast_forward_inputs = true;                  // to param_dtype; off: the caller does
};

namespace detail {

/// NotImplementedError where an output_dtype is asked for.
inline void check_output_dtype(std::string_view where, const MixedPrecision& precision) {
  if (!precision.output_dtype.has_value()) return;
  raise<c10::NotImplementedError>({where,
                                   c10::str("mixed_precision.output_dtype is ", *precision.output_dtype,
                                            ", and forward of a torch::nn module has no hook to cast in"),
                                   c10::str("cast what forward returns: y.to(at::k", *precision.output_dtype, ")")});
}

}  // namespace detail

}  // namespace serried
