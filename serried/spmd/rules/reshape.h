// The rule of a change of shape that keeps the elements in order.
#pragma once

#include <c10/util/ArrayRef.h>

#include <optional>
#include <string>

#include "serried/mesh/layout.h"

namespace serried::spmd::detail {

/// Factors common to both shapes: kept dims keep their letter, merged and split ones share it.
///     reshape_rule({6, 12, 6}, {72, 6})  ->  "abc => (ab)c; size"
///     reshape_rule({72, 6}, {6, 12, 6})  ->  "(a=6b=12)c => abc; size"
/// Both shapes have the same number of elements. Empty where a shape has too many dims for the notation.
std::string reshape_rule(c10::IntArrayRef from, c10::IntArrayRef to);

/// `asked` with its -1 replaced; none where it does not fit `numel` elements.
std::optional<Sizes> resolve_sizes(int64_t numel, c10::IntArrayRef asked);

}  // namespace serried::spmd::detail
