// Fix-ups: how a local call differs from the global one, by name. A rule is the mathematics, a fix-up the bookkeeping.
#pragma once

#include <ATen/core/stack.h>

#include <string_view>
#include <vector>

#include "serried/spmd/plan.h"

namespace serried::spmd {

/// One rank's view of a planned call.
struct LocalCall {
  const Call& call;  // global shapes and arguments
  const Plan& plan;
  Position at;
  /// Sizes and first indices of this rank's part of input i or output o, in the global tensor.
  c10::DimVector input_sizes(size_t i) const;
  c10::DimVector input_offsets(size_t i) const;
  c10::DimVector output_sizes(size_t o) const;
  /// Whether any axis cuts dim `dim` of input i.
  bool input_cut(size_t i, int64_t dim) const;
};

/// Both hooks may be null. They see only plain local tensors.
struct Fixup {
  std::string_view name;
  /// Changes the local arguments (schema order) before the call. May be computed once per plan and rank when
  /// `is_static`.
  void (*before)(const LocalCall& local, const FixupPattern& pattern, torch::jit::Stack& arguments) = nullptr;
  /// Changes the local results (in order) after the call; `arguments` are those of the call.
  void (*after)(const LocalCall& local, const FixupPattern& pattern, const torch::jit::Stack& arguments,
                torch::jit::Stack& results) = nullptr;
  /// `before` changes only arguments that are not tensors: the dispatcher keeps the result with the plan.
  bool is_static = false;
};

/// Null for an unknown name.
const Fixup* find_fixup(std::string_view name);

/// All names, sorted.
std::vector<std::string_view> fixup_names();

namespace detail {

/// pick v: input 0 is the table, cut along v; the argument called index, indices or target says what to look up. Makes
/// the indices local; those of other ranks become 0 and are remembered until `mask_results` of the same call.
void shift_indices(const LocalCall& local, const FixupPattern& pattern, torch::jit::Stack& arguments);

/// Zeroes what was looked up for indices of other ranks: the results are a sum over ranks then.
void mask_results(const LocalCall& local, const FixupPattern& pattern, const torch::jit::Stack& arguments,
                  torch::jit::Stack& results);

/// target c: of a loss by class whose `self` is cut along c, the classes. Makes `target` local; targets of other ranks
/// are ignored, so that losses and total weights are a sum over ranks.
void localize_targets(const LocalCall& local, const FixupPattern& pattern, torch::jit::Stack& arguments);

}  // namespace detail

}  // namespace serried::spmd
