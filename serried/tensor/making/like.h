// New parts for results of random ops and factories.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>

#include <optional>
#include <string_view>

#include "serried/tensor/spec.h"

namespace serried::detail {

/// A part and what it is a part of.
struct Part {
  at::Tensor local;
  SpecPtr spec;
};

/// Uninitialised memory for this rank's part of a tensor as `spec` says, in its memory order.
at::Tensor empty_part(const Spec& spec);

/// A new tensor's part beside `like`: Partial becomes Replicate.
Part empty_beside(const Spec& like, std::optional<at::ScalarType> dtype = {},
                  at::MemoryFormat format = at::MemoryFormat::Preserve);

/// The strides of a new tensor; `like` counts where `format` is Preserve.
c10::DimVector strides_for(c10::IntArrayRef sizes, at::MemoryFormat format, c10::IntArrayRef like = {});

/// A known value as a Partial: one rank of an axis holds it, the others the identity of this kind, so that the
/// reduction gives it back. None on ranks that hold the value; where ranks with equal values reduce to it, all do.
std::optional<ReduceKind> identity_here(const Placements& placements, const Position& at);

/// ValueError: a random tensor is no reduction of others.
void reject_partial(std::string_view where, const Spec& spec);

}  // namespace serried::detail
