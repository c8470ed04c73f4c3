// The tensors among the arguments of a boxed call, flattened.
#pragma once

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "serried/base/hash.h"
#include "serried/spmd/op_call.h"
#include "serried/tensor/dispatch/op_info.h"
#include "serried/tensor/kind.h"
#include "serried/tensor/meta.h"

namespace serried::detail {

/// A defined tensor: an argument, or an element of one.
struct TensorSlot {
  int argument;
  int list_index;  // -1: not in a list
  c10::TensorImpl* impl;
  const DTensorMeta* meta;  // null: plain
};

struct Arguments {
  c10::SmallVector<TensorSlot, 8> tensors;  // in schema order, out= ones left out
  c10::SmallVector<uint64_t, 24> key;       // op, specs and static arguments: what decides the plan
  const Spec* first = nullptr;              // of the first DTensor
  bool cacheable = true;
  bool has_copied_view = false;
  bool has_other_kind = false;      // a tensor of ours that is no DTensor, or a parameter that is gathered on use
  bool has_like_parameter = false;  // a gradient or state of such parameters
  bool has_plain = false;           // of more than one element
  uint64_t hash = 0;                // of op and key; see seal
};

/// The words of a key, one value at a time; what `collect` does for boxed values. `impl` null: no tensor there.
void add_tensor(Arguments& arguments, c10::TensorImpl* impl, int argument, int list_index);
void add_integer(Arguments& arguments, int64_t value);
void add_integers(Arguments& arguments, c10::IntArrayRef values);
void add_flag(Arguments& arguments, bool value);
void add_number(Arguments& arguments, double value);
void add_text(Arguments& arguments, std::string_view value);
void add_none(Arguments& arguments);
/// A number that no plan depends on.
void add_any_number(Arguments& arguments);

/// Ends the key: nothing is added after it. `collect` does it, too.
inline void seal(const OpInfo& info, Arguments& arguments) {
  uint64_t hash = reinterpret_cast<uintptr_t>(&info);
  for (uint64_t word : arguments.key) hash = mix_hash(hash, word);
  arguments.hash = hash;
}

/// Raises where a plain tensor stands beside DTensors, meshes differ, or a copied view is stale.
void check_together(const OpInfo& info, const Arguments& arguments);

/// Autograd's formulas write DTensors into zeros they have made: those become replicated DTensors in place.
void adopt_written(const OpInfo& info, Arguments& arguments);

/// Reads the top of `stack` and checks it.
void collect(const OpInfo& info, const torch::jit::Stack& stack, Arguments& arguments);

/// The same as rules see it. Views `values`, the call's arguments.
spmd::Call describe(const OpInfo& info, const Arguments& arguments, c10::ArrayRef<c10::IValue> values);

/// Placements of each tensor; plain ones are replicated.
std::vector<Placements> current_placements(const Arguments& arguments);

/// The spec of a tensor; for a plain one that of a replicated tensor on `mesh`.
SpecPtr spec_of(const TensorSlot& slot, const DeviceMesh& mesh);

/// The local part of a tensor, the tensor itself where it is plain.
at::Tensor local_of(const TensorSlot& slot);

/// The kind whose call is on top of `stack`, by all tensors among its arguments, out= ones too. Null: all are plain.
/// TypeError where kinds meet of which none takes the others.
const TensorKind* kind_of_call(const OpInfo& info, const torch::jit::Stack& stack);

}  // namespace serried::detail
