// A rule laid over one call: letters become factors with sizes, slots become tensors.
#pragma once

#include <c10/util/SmallVector.h>

#include <string>
#include <vector>

#include "serried/spmd/op_call.h"
#include "serried/spmd/rule.h"

namespace serried::spmd {

struct Factor {
  char letter = 0;           // '.' for those of an ellipsis
  int64_t size = -1;         // -1: only outputs have it, known after the call
  bool can_cut = true;       // false: upper case
  bool must_divide = false;  // part of a compound dim: only equal parts have the same layout on both sides
};

/// Per dim the factors it is made of, leading first; none: size 1 or broadcast.
using DimFactors = c10::SmallVector<int16_t, 2>;

struct BoundTensor {
  uint8_t term = 0;
  uint8_t slot = 0;  // of the rule
  bool linear = true;
  bool list = false;  // of an output: a list whose elements all lie like this
  c10::SmallVector<DimFactors, 5> dims;
  /// The dim whose leading factor is `factor`; -1: the tensor does not have it; -2: it does, but not in front.
  int position(int16_t factor) const;
};

/// `inputs` are parallel to call.tensors(). An output's number of dims may be unknown where a rule's output has an
/// ellipsis that no input has; such a rule is malformed and raises.
struct Bound {
  Rule rule;
  std::vector<Factor> factors;
  std::vector<BoundTensor> inputs;
  std::vector<BoundTensor> outputs;
  uint8_t num_terms = 1;
};

/// ValueError naming op, rule and the argument that does not fit.
Bound bind(const Rule& rule, const Call& call);

/// The size of dim `dim` of output `output`: -1 where only the local result tells (it is whole then).
int64_t output_size(const Bound& bound, size_t output, size_t dim);

}  // namespace serried::spmd
