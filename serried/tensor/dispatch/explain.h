// Says how an op on distributed tensors would run: rule, rows, costs, what moves, how results lie.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "serried/spmd/cost.h"
#include "serried/spmd/op_call.h"

namespace serried {

/// How `op` would run on these tensors, in schema order; other arguments take their defaults. `op` is "aten::mm", or
/// with an overload "aten::add.Tensor"; without one the first overload that takes so many tensors. Runs nothing,
/// communicates nothing. ValueError where there is no such op or an argument has no default.
///     std::cout << explain("aten::mm", {a, b});
std::string explain(const std::string& op, const std::vector<at::Tensor>& tensors);

std::string explain(const std::string& op, std::initializer_list<at::Tensor> tensors);

/// The same with all arguments given.
std::string explain(const std::string& op, const torch::jit::Stack& arguments);

/// A mesh without ranks.
struct MeshAxes {
  Sizes shape;
  std::vector<std::string> names = {};      // none, or one per axis
  std::vector<spmd::CostModel> costs = {};  // none: spmd::cost_model() on all, or one per axis
};

/// The same of a call that nobody can make here: shapes, placements and a mesh are all it needs.
std::string explain(const spmd::Call& call, const std::vector<Placements>& placements, const MeshAxes& mesh);

}  // namespace serried
