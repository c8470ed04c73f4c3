// The tensors of a random program: made, picked, placed and summed up.
#include "tests/support/tensor_programs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

constexpr int64_t kLargest = 400;

bool are_broadcastable(const at::Tensor& a, const at::Tensor& b) {
  const int64_t shared = std::min(a.dim(), b.dim());
  for (int64_t d = 1; d <= shared; ++d) {
    if (a.size(-d) != b.size(-d) && a.size(-d) != 1 && b.size(-d) != 1) return false;
  }
  return true;
}

}  // namespace

at::Tensor Dice::normal(at::IntArrayRef sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(engine_()), at::kDouble);
}

TensorProgram::TensorProgram(uint64_t seed, const DeviceMesh* mesh, std::optional<uint64_t> noise)
    : dice(seed), placing_(seed + 1'000'003), mesh_(mesh) {
  if (noise) noise_.emplace(*noise);
  const int64_t ndim = dice.between(1, 3);
  for (int64_t d = 0; d < ndim; ++d) shape_.push_back(dice.between(1, 7));
  const int64_t num_leaves = dice.between(1, 3);
  for (int64_t i = 0; i < num_leaves; ++i) add_leaf();
}

Placements TensorProgram::random_placements(int64_t ndim, bool partial) {
  Placements placements;
  for (int64_t axis = 0; axis < mesh_->ndim(); ++axis) {
    const int64_t choice = placing_.below(ndim + 2);
    if (choice < ndim) {
      placements.push_back(Shard(choice));
    } else {
      placements.push_back(partial && choice == ndim ? Placement(Partial()) : Placement(Replicate()));
    }
  }
  return placements;
}

void TensorProgram::add_leaf() {
  std::vector<int64_t> sizes;
  for (size_t d = size_t(dice.chance(0.3) ? dice.below(int64_t(shape_.size())) : 0); d < shape_.size(); ++d) {
    sizes.push_back(dice.chance(0.15) ? 1 : shape_[d]);
  }
  at::Tensor value = dice.normal(sizes);
  if (noise_) value = value * (1 + noise_->normal(sizes) * 4e-16);
  if (mesh_ != nullptr) value = place(value, *mesh_, random_placements(value.dim(), true));
  leaves.push_back(value.detach().requires_grad_());
  log +=
      c10::str("leaf ", at::IntArrayRef(sizes), is_dtensor(value) ? to_string(DTensor(value).placements()) : "", "\n");
  push(leaves.back(), /*writable=*/false);
}

at::Tensor TensorProgram::constant(const at::Tensor& value) {
  if (mesh_ == nullptr) return value;
  return place(value, *mesh_, random_placements(value.dim(), value.is_floating_point()));
}

at::Tensor TensorProgram::indices(at::IntArrayRef sizes, int64_t below) {
  at::Tensor values = at::empty(sizes, at::kLong);
  auto* data = values.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < values.numel(); ++i) data[i] = dice.below(below);
  return constant(values);
}

at::Tensor TensorProgram::pick() {
  return tensors[size_t(dice.below(int64_t(tensors.size())))];
}

std::optional<at::Tensor> TensorProgram::pick_where(const std::function<bool(const at::Tensor&)>& fits) {
  std::vector<at::Tensor> fitting;
  for (const at::Tensor& t : tensors) {
    if (fits(t)) fitting.push_back(t);
  }
  if (fitting.empty()) return std::nullopt;
  return fitting[size_t(dice.below(int64_t(fitting.size())))];
}

at::Tensor TensorProgram::pick_beside(const at::Tensor& t) {
  return *pick_where([&](const at::Tensor& other) { return are_broadcastable(t, other); });
}

std::optional<at::Tensor> TensorProgram::pick_writable() {
  return pick_where([&](const at::Tensor& t) { return is_writable(t); });
}

bool TensorProgram::is_writable(const at::Tensor& t) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_same(t)) return writable_[i] != 0;
  }
  return false;
}

void TensorProgram::push(const at::Tensor& t, bool writable) {
  if (t.numel() > kLargest || t.dim() > 5 || t.numel() == 0) return;
  tensors.push_back(t);
  writable_.push_back(writable);
}

void TensorProgram::push_view(const at::Tensor& t, const at::Tensor& base) {
  push(t, is_writable(base));
}

// A copy in both kinds of runs, so that later writes mean the same.
void TensorProgram::redistribute_one() {
  const size_t i = size_t(dice.below(int64_t(tensors.size())));
  log += c10::str("redistribute a copy of ", tensors[i].sizes());
  at::Tensor t = tensors[i];
  if (mesh_ != nullptr) {
    const Placements to = random_placements(t.dim(), false);
    log += " to " + to_string(to);
    t = DTensor(t).redistribute(to);
  }
  log += "\n";
  push(t.clone());
}

at::Tensor TensorProgram::run(int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    if (dice.chance(0.15)) {
      redistribute_one();
      continue;
    }
    const double kind = double(dice.below(100));
    const std::vector<TensorOp>& ops = kind < 55 ? tensor_ops() : kind < 85 ? shape_ops() : writing_ops();
    const TensorOp& op = ops[size_t(dice.below(int64_t(ops.size())))];
    log += op.name;
    const size_t before = tensors.size();
    op.run(*this);
    for (size_t k = before; k < tensors.size(); ++k) {
      log += c10::str(" -> ", tensors[k].sizes());
      if (is_dtensor(tensors[k])) log += " " + to_string(DTensor(tensors[k]).placements());
    }
    log += "\n";
  }
  at::Tensor loss;
  for (const at::Tensor& t : tensors) {
    if (!t.requires_grad()) continue;
    const at::Tensor term = (t * normal(t.sizes())).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

}  // namespace serried::testing
