// What random programs of collectives are made of: groups, shapes, values and memory, drawn alike on all ranks.
#pragma once

#include <torch/torch.h>

#include <random>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::testing {

inline int64_t pick(std::mt19937_64& random, int64_t count) {
  return int64_t(random() % uint64_t(count));
}

template <class T>
const T& one_of(std::mt19937_64& random, const std::vector<T>& list) {
  return list[size_t(pick(random, int64_t(list.size())))];
}

/// One rank's run of a program: decisions that all ranks share come from `shared_`, this rank's own from `mine_`.
class CollectiveProgram {
 public:
  CollectiveProgram(uint64_t seed, const Group& world, std::string backend)
      : mine_(seed * 1000 + uint64_t(world->getRank())), seed_(seed), backend_(std::move(backend)), world_(world) {}

 protected:
  struct Shape {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };

  /// Chooses who takes part in the step: all ranks, or parts of them by themselves.
  void begin(int64_t step);

  bool is_gloo() const { return backend_ == "gloo"; }

  Shape draw_shape(int64_t max_dims = 3);
  c10d::ReduceOp::RedOpType draw_op(at::ScalarType dtype);

  void draw_kind_of_values();
  /// The values of `rank`; all ranks know those of all.
  at::Tensor values(const Shape& shape, int rank);
  std::vector<at::Tensor> all_values(const Shape& shape);

  /// The same values in memory of another kind, which each rank chooses for itself.
  at::Tensor laid_out(const at::Tensor& x, bool only_contiguous = false);
  /// What only is read may also be one row seen many times.
  at::Tensor as_input(const at::Tensor& x) { return rows_equal_ && pick(mine_, 2) == 0 ? x : laid_out(x); }

  std::mt19937_64 shared_;
  std::mt19937_64 mine_;
  Group g_;
  int n_ = 1;
  int me_ = 0;
  std::string what_;

 private:
  Group part_of_world();

  const uint64_t seed_;
  const std::string backend_;
  const Group world_;
  int64_t salt_ = 0;
  bool rows_equal_ = false;
};

}  // namespace serried::testing
