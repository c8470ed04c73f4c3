// Draws for random programs of collectives.
#include "tests/support/collective_programs.h"

#include <algorithm>

#include "tests/support/on_ranks.h"

namespace serried::testing {

using c10d::ReduceOp;

void CollectiveProgram::begin(int64_t step) {
  // Anew for each step: the parts of a split draw different numbers of numbers.
  shared_.seed(seed_ * 1000 + uint64_t(step));
  g_ = world_;
  if (world_->getSize() > 1 && pick(shared_, 4) == 0) g_ = part_of_world();
  n_ = g_->getSize();
  me_ = g_->getRank();
  what_ = c10::str(backend_, " of ", world_->getSize(), ", step ", step);
}

Group CollectiveProgram::part_of_world() {
  std::vector<int> ranks(world_->getSize());
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = int(i);
  std::shuffle(ranks.begin(), ranks.end(), shared_);
  const auto cut = ranks.begin() + pick(shared_, int64_t(ranks.size()));
  std::vector<std::vector<int>> parts;
  if (cut != ranks.begin()) parts.emplace_back(ranks.begin(), cut);
  parts.emplace_back(cut, ranks.end());
  return split_group(world_, parts);
}

CollectiveProgram::Shape CollectiveProgram::draw_shape(int64_t max_dims) {
  Shape shape;
  do {
    shape.dtype = one_of(shared_, kAllDtypes);
  } while (is_gloo() && (shape.dtype == at::kShort || at::isComplexType(shape.dtype)));
  if (pick(shared_, 6) == 0) {
    shape.sizes = {one_of<int64_t>(shared_, {5000, 20'001, 70'003})};
    return shape;
  }
  const int64_t dims = 1 + pick(shared_, max_dims);
  for (int64_t d = 0; d < dims; ++d) shape.sizes.push_back(pick(shared_, 7));
  return shape;
}

ReduceOp::RedOpType CollectiveProgram::draw_op(at::ScalarType dtype) {
  static const std::vector<ReduceOp::RedOpType> ops = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                                       ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
                                                       ReduceOp::BOR, ReduceOp::BXOR};
  while (true) {
    const ReduceOp::RedOpType op = one_of(shared_, ops);
    const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
    const bool ordered = op == ReduceOp::MIN || op == ReduceOp::MAX;
    if (bitwise && !at::isIntegralType(dtype, /*includeBool=*/true)) continue;
    if (ordered && at::isComplexType(dtype)) continue;
    if (op == ReduceOp::AVG && dtype == at::kBool) continue;
    return op;
  }
}

void CollectiveProgram::draw_kind_of_values() {
  salt_ = pick(shared_, 1000);
  rows_equal_ = pick(shared_, 5) == 0;
}

at::Tensor CollectiveProgram::values(const Shape& shape, int rank) {
  if (!rows_equal_) return sample(shape.sizes, rank, shape.dtype, salt_);
  std::vector<int64_t> one_row = shape.sizes;
  one_row[0] = 1;
  return sample(one_row, rank, shape.dtype, salt_).expand(shape.sizes);
}

std::vector<at::Tensor> CollectiveProgram::all_values(const Shape& shape) {
  draw_kind_of_values();
  std::vector<at::Tensor> all;
  for (int r = 0; r < n_; ++r) all.push_back(values(shape, r));
  return all;
}

at::Tensor CollectiveProgram::laid_out(const at::Tensor& x, bool only_contiguous) {
  const int64_t last = x.size(-1);
  switch (pick(mine_, only_contiguous ? 3 : 6)) {
    case 0: {  // in the middle of another tensor
      const at::Tensor base = at::zeros({x.numel() + 5}, x.options());
      return base.narrow(0, 3, x.numel()).view(x.sizes()).copy_(x);
    }
    case 1: {
      if (is_gloo()) return x.clone();
      const at::Tensor block = g_->getBackend(at::kCPU)->allocateTensor(x.numel(), x.options());
      return block.view(x.sizes()).copy_(x);
    }
    case 2: return x.clone();
    case 3: return x.transpose(0, -1).clone(at::MemoryFormat::Contiguous).transpose(0, -1);
    case 4: {  // every second of the last dim
      std::vector<int64_t> twice = x.sizes().vec();
      twice.back() *= 2;
      return at::zeros(twice, x.options()).slice(-1, 0, 2 * last, 2).copy_(x);
    }
    default: return x.is_complex() ? x.conj_physical().conj() : x.flip(0).flip(0);
  }
}

}  // namespace serried::testing
