// The halves of a mixture of experts without the checks for users.
#pragma once

#include "serried/parallel/expert_parallel/dispatch.h"
#include "serried/parallel/expert_parallel/traffic.h"

namespace serried::detail {

/// Which row of another tensor each row is.
struct RowMap {
  at::Tensor index;    // int64 [rows]
  at::Tensor is_none;  // bool [rows, 1]: rows of zeros; undefined where there is none
};

/// Where the tokens of a call went.
struct TokenWay {
  DeviceMesh mesh;
  Traffic traffic;
  std::vector<int64_t> sizes;  // of the tokens, all dims
  at::ScalarType dtype;
  int64_t num_choices;
  RowMap slot_of_choice;  // [tokens x choices]: the row that each was sent as; none: dropped
  RowMap choice_of_slot;  // and back; none: a row that is left empty
  bool averages = false;
  bool has_unit_weights = false;  // the softmax over one choice: 1, whatever the router says
};

/// What the public functions and moe differ in.
struct DispatchCall {
  const char* where;
  DeviceMesh mesh;  // one axis
  int64_t num_experts;
  int64_t num_local;
  bool trains;       // this rank's experts may have parameters that require gradients
  bool is_in_range;  // numbers of experts need not be looked at
  bool has_unit_weights = false;
};

/// How many rows go to an expert, by `capacity`; ValueError where that is no positive number.
std::optional<int64_t> slots_for(const char* where, std::optional<double> capacity, int64_t num_tokens,
                                 int64_t num_choices, int64_t num_experts);

DispatchedTokens dispatch(const DispatchCall& call, const at::Tensor& x, const at::Tensor& experts,
                          const DispatchOptions& options);

/// `results` by local expert.
at::Tensor combine(const std::vector<at::Tensor>& results, const DispatchedTokens& dispatched,
                   const at::Tensor& weights);

/// All rows, as in `dispatched.tokens`.
at::Tensor combine_grouped(const at::Tensor& results, const DispatchedTokens& dispatched, const at::Tensor& weights);

/// ValueError or TypeError, which says what `gave` the result, unless that is plain with one row of a token's width for
/// each of `num_rows`.
void check_result(const char* where, const std::string& gave, const at::Tensor& result, int64_t num_rows,
                  int64_t width);

}  // namespace serried::detail
