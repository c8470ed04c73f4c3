// Meshes of thread ranks for tests.
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

int64_t product(const Sizes& sizes) {
  int64_t result = 1;
  for (int64_t size : sizes) result *= size;
  return result;
}

// Sums over the axis to `value`, with parts that share no sign or size.
at::Tensor part_of_sum(const at::Tensor& value, int64_t rank, int64_t ranks) {
  if (ranks == 1) return value;
  if (rank == ranks - 1) return value * -double(ranks - 1) + 3.0 * double(ranks - 1);
  return value * (double(ranks) / double(ranks - 1)) - 3.0;
}

}  // namespace

void on_mesh(const Sizes& shape, const std::function<void(const DeviceMesh&)>& fn) {
  run_ranks(int(product(shape)), [&](const Group& group) { fn(init_device_mesh("cpu", shape, {}, {.group = group})); });
}

std::vector<Sizes> usual_meshes() {
  return {{1}, {2}, {3}, {4}, {2, 2}};
}

std::vector<Placements> placement_lists(const Placements& options, size_t num_axes) {
  std::vector<Placements> lists = {{}};
  for (size_t axis = 0; axis < num_axes; ++axis) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& option : options) {
        longer.push_back(list);
        longer.back().push_back(option);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

std::vector<Placements> all_placements(int64_t ndim, size_t mesh_ndim, bool partial) {
  Placements options = {Replicate()};
  for (int64_t dim = 0; dim < ndim; ++dim) options.push_back(Shard(dim));
  if (partial) options.push_back(Partial());
  return placement_lists(options, mesh_ndim);
}

DTensor place(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor value = full;
  Placements cut = placements;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) continue;
    value = part_of_sum(value, mesh.get_local_rank(int64_t(axis)), mesh.size(int64_t(axis)));
    cut[axis] = Replicate();
  }
  const at::Tensor local = distribute_tensor(value, mesh, cut, {.source = std::nullopt}).to_local();
  return DTensor::from_local(local, mesh, placements, {.shape = full.sizes().vec(), .stride = full.strides().vec()});
}

at::Tensor full(const at::Tensor& t) {
  return is_dtensor(t) ? DTensor(t).full_tensor() : t;
}

at::Tensor iota(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::arange(c10::multiply_integers(sizes)).to(dtype).reshape(sizes);
}

}  // namespace serried::testing
