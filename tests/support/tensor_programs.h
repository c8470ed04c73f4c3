// Programs of random tensor ops: one seed gives the same program on plain tensors and on DTensors.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "serried/mesh/mesh.h"

namespace serried::testing {

/// Numbers that decide a program. Never asked about values, so all runs of a seed take the same path.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return int64_t(engine_() % uint64_t(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return double(engine_() % 1'000'000) < p * 1e6; }
  at::Tensor normal(at::IntArrayRef sizes);

 private:
  std::mt19937_64 engine_;
};

/// Tensors that a program has made so far, and how it makes more. Plain where `mesh` is null; else DTensors, whose
/// placements are random too.
class TensorProgram {
 public:
  /// `noise`: every leaf is moved by a few units in the last place, at random.
  TensorProgram(uint64_t seed, const DeviceMesh* mesh, std::optional<uint64_t> noise = std::nullopt);

  Dice dice;

  /// One of the tensors made so far; of those that `fits` says.
  at::Tensor pick();
  std::optional<at::Tensor> pick_where(const std::function<bool(const at::Tensor&)>& fits);
  /// One that broadcasts with `t`.
  at::Tensor pick_beside(const at::Tensor& t);
  /// One that may be written: no leaf, no view of one.
  std::optional<at::Tensor> pick_writable();
  /// A dim of `t`; `t` has some.
  int64_t dim_of(const at::Tensor& t) { return dice.below(t.dim()); }

  /// `value`, equal in all runs, as a tensor of the program that needs no gradient.
  at::Tensor constant(const at::Tensor& value);
  at::Tensor normal(at::IntArrayRef sizes) { return constant(dice.normal(sizes)); }
  at::Tensor indices(at::IntArrayRef sizes, int64_t below);

  /// A result: kept for later ops where it is not too large.
  void push(const at::Tensor& t, bool writable = true);
  /// A view of `base`.
  void push_view(const at::Tensor& t, const at::Tensor& base);

  /// Runs `steps` ops and sums up all tensors, each element with a weight.
  at::Tensor run(int64_t steps);

  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> tensors;
  std::string log;  // what was done, in order

 private:
  void add_leaf();
  void redistribute_one();
  Placements random_placements(int64_t ndim, bool partial);
  bool is_writable(const at::Tensor& t) const;

  Dice placing_;
  const DeviceMesh* mesh_;
  std::optional<Dice> noise_;
  std::vector<int64_t> shape_;  // leaves are made of parts of it
  std::vector<char> writable_;
};

struct TensorOp {
  const char* name;
  std::function<void(TensorProgram&)> run;
};

/// What programs are made of.
const std::vector<TensorOp>& tensor_ops();
const std::vector<TensorOp>& shape_ops();
const std::vector<TensorOp>& writing_ops();

}  // namespace serried::testing
