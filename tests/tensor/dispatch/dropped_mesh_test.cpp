// Meshes that nobody uses any more: their groups go with them, whatever was computed on them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "serried/comm/collectives/collectives.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/dispatch/explain.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::expect_close;
using testing::full;
using testing::place;

int64_t count_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

// Of memory that ranks share; the sanitizers map memory of their own all the time.
int64_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int64_t count = 0;
  while (std::getline(maps, line)) count += line.find("/memfd:serried") != std::string::npos;
  return count;
}

// Plans, redistributions, gradients, random numbers, copied views, and what asks for explanations.
void use(const DeviceMesh& mesh, const Group& of_all) {
  const at::Tensor value = testing::iota({5, 3});
  const DTensor x = place(value, mesh, Placements(size_t(mesh.ndim()), Shard(0)));
  const at::Tensor leaf = x.detach().requires_grad_();
  (leaf.t().mm(leaf) + leaf.select(0, 1)).pow(2).mean().backward();
  at::Tensor noise = at::empty_like(x);
  noise.normal_();
  explain("aten::mul", {x, x});
  expect_close(full(x.redistribute(Placements(size_t(mesh.ndim())))), value);
  barrier(of_all);
}

void make_and_drop(const Group& group, int count) {
  for (int i = 0; i < count; ++i) {
    // Every mesh of its own ranks, in an order that needs a group of its own.
    const DeviceMesh line("cpu", at::tensor({1, 0, 2, 3}, at::kLong), {}, {.group = group});
    use(line, group);
    const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    use(grid, group);
    use(grid["tp"], group);
  }
}

TEST(DroppedMesh, GroupsGoWithTheMesh) {
  int64_t descriptors = 0;
  int64_t mappings = 0;
  run_ranks(4, [&](const Group& group) {
    make_and_drop(group, 2);
    barrier(group);
    if (group->getRank() == 0) {
      descriptors = count_descriptors();
      mappings = count_mappings();
      EXPECT_GT(mappings, 0);
    }
    barrier(group);
    make_and_drop(group, 300);
    barrier(group);
    if (group->getRank() == 0) {
      EXPECT_LE(count_descriptors(), descriptors + 8);
      EXPECT_LE(count_mappings(), mappings + 8);
    }
    barrier(group);
  });
}

TEST(DroppedMesh, ItsLastTensorKeepsItAlive) {
  run_ranks(4, [](const Group& group) {
    std::optional<DTensor> kept;
    at::Tensor loss;
    {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
      kept = place(testing::iota({5, 3}), mesh, {Shard(0), Shard(1)});
      const at::Tensor leaf = (*kept * 1).requires_grad_();
      loss = DTensor(leaf * leaf).redistribute({Replicate(), Replicate()}).to_local().sum();
    }
    loss.backward();
    expect_close(kept->full_tensor(), testing::iota({5, 3}));
    expect_close(full(*kept * 2), testing::iota({5, 3}) * 2);
  });
}

TEST(DroppedMesh, PlansAreFoundAgainWhileTheMeshIsAlive) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const auto compute = [&] {
      const at::Tensor x = place(testing::iota({5, 3}), mesh, {Shard(0)});
      return (x.mm(x.t()) + 1).sum().mul(2);
    };
    compute();
    reset_dispatch_stats();
    for (int i = 0; i < 10; ++i) compute();
    EXPECT_EQ(dispatch_stats().misses, 0) << "no spec of the calls was alive in between";
  });
}

}  // namespace
}  // namespace serried
