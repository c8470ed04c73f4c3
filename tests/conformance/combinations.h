// Which placements of a case's arguments are tried: all of them where they are few, else a fixed choice by hash.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serried/mesh/placement.h"
#include "tests/support/vectors.h"

namespace serried::testing {

/// The tensors among the arguments, in schema order, lists element by element; absent ones and numbers left out.
struct TensorPlace {
  size_t argument = 0;
  int64_t element = -1;  // of a list; -1: the argument itself
  at::Tensor tensor;
};
std::vector<TensorPlace> tensor_places(const VectorCase& vector_case);

/// How one tensor may lie on a mesh of `mesh_ndim` axes. One axis: R, then S0, S1, ... for each dim larger than 1, then
/// P where the dtype can be split and the op does not write to it. Several axes: all tuples of these, the last axis
/// varying fastest.
std::vector<Placements> placement_options(const at::Tensor& tensor, bool is_mutated, int64_t mesh_ndim);

/// One placement list per tensor.
using Combination = std::vector<Placements>;

/// "R,S1,P"; axes are joined by ":", as in "S0:R,R:P".
std::string to_string(const Combination& combination);

inline constexpr size_t kMaxCombinations = 12;

/// All combinations in order of the product, last tensor fastest, if they are at most kMaxCombinations. Else the one
/// that is all Replicate and those with the lowest FNV-1a hash of "<case id>|<text>".
std::vector<Combination> combinations(const VectorCase& vector_case, int64_t mesh_ndim);

/// FNV-1a, 64 bits.
uint64_t fnv1a(std::string_view text);

}  // namespace serried::testing
