// The groups of a mesh: every axis, several axes at once, made on first use by their members alone.
#include "serried/mesh/mesh.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"

namespace serried {
namespace {

using testing::expect_equal;

// What each rank puts in: different powers of two, so that a sum tells who was in it.
at::Tensor mark(int64_t rank) {
  return at::full({1}, int64_t(1) << rank, at::kLong);
}

// The sum over the given axes at this rank's place, from the table of ranks alone.
at::Tensor expected_sum(const DeviceMesh& mesh, at::IntArrayRef axes) {
  const at::Tensor marks = at::pow(at::full({}, 2, at::kLong), mesh.ranks());
  at::Tensor sums = marks.sum(axes, /*keepdim=*/true).expand(mesh.shape());
  const auto at = *mesh.get_coordinate();
  for (int64_t coordinate : at) sums = sums.select(0, coordinate);
  return sums.view({1});
}

// The ranks of the group in its order, against the sub-array of the mesh.
void expect_order(const DeviceMesh& mesh, const Group& group, at::IntArrayRef axes) {
  at::Tensor expected = mesh.ranks();
  const auto at = *mesh.get_coordinate();
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) expected = expected.select(axis, at[size_t(axis)]);
  }
  expect_equal(all_gather(at::full({1}, mesh.get_rank(), at::kLong), group), expected.reshape({-1}));
}

void check_groups(const DeviceMesh& mesh, at::IntArrayRef axes, const Group& group) {
  expect_equal(all_reduce(mark(mesh.get_rank()), group), expected_sum(mesh, axes), mesh.to_string());
  expect_order(mesh, group, axes);
}

void check_all_groups(const DeviceMesh& mesh) {
  for (int64_t chosen = 1; chosen < (int64_t(1) << mesh.ndim()); ++chosen) {
    Sizes axes;
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      if ((chosen >> axis & 1) != 0) axes.push_back(axis);
    }
    check_groups(mesh, axes, mesh.get_merged_group(axes));
    if (axes.size() == 1) check_groups(mesh, axes, mesh.get_group(axes[0]));
  }
}

TEST(MeshGroups, SpanTheirAxesOnEveryShape) {
  for (const Sizes& shape : std::vector<Sizes>{{1}, {3}, {2, 2}, {2, 3}, {3, 2}, {1, 4}, {2, 1, 2}, {2, 2, 2}}) {
    int64_t size = 1;
    for (int64_t length : shape) size *= length;
    run_ranks(int(size), [&](const Group& group) { check_all_groups(init_device_mesh("cpu", shape)); });
  }
}

TEST(MeshGroups, KeepTheMeshsOrderOfRanks) {
  run_ranks(4, [](const Group& group) {
    check_all_groups(DeviceMesh("cpu", at::arange(4).view({2, 2}).t()));
    check_all_groups(DeviceMesh("cpu", at::tensor({3, 1, 2, 0}, at::kLong).view({2, 2})));
    check_all_groups(DeviceMesh("cpu", at::arange(4).flip({0})));
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    check_all_groups(DeviceMesh::concatenate({mesh["tp"], mesh["dp"]}));
  });
}

TEST(MeshGroups, OfAFlattenedAndAnUnflattenedMesh) {
  run_ranks(6, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 3}, {"dp", "tp"});
    check_all_groups(mesh.flatten());
    check_all_groups(mesh.flatten("all").unflatten(0, {2, 3}, {"x", "y"}));
  });
}

TEST(MeshGroups, AreMadeOnceAndShared) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.get_group("tp"), mesh.get_group(1));
    EXPECT_EQ(mesh["tp"].get_group(), mesh.get_group(1));
    EXPECT_EQ(mesh.get_merged_group({1}), mesh.get_group(1));
    EXPECT_EQ(mesh.get_all_groups(), (std::vector<Group>{mesh.get_group(0), mesh.get_group(1)}));
    EXPECT_EQ(mesh.flatten("all").get_group(), mesh.get_merged_group({0, 1}));
    EXPECT_EQ(mesh.get_merged_group({0, 1}), group);  // all ranks in order: the root's own
    EXPECT_NE(mesh.get_group(0), mesh.get_group(1));
  });
}

TEST(MeshGroups, AreMadeByTheirMembersAlone) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    if (mesh.get_local_rank("dp") == 0) {
      expect_equal(all_reduce(mark(mesh.get_rank()), mesh.get_group("tp")), at::full({1}, 3, at::kLong));
    }
    barrier(group);
    const DeviceMesh turned("cpu", at::tensor({1, 0, 2, 3}, at::kLong).view({2, 2}), {"dp", "tp"});
    if (turned.get_local_rank("dp") == 0) {
      expect_equal(all_reduce(mark(mesh.get_rank()), turned.get_group("tp")), at::full({1}, 3, at::kLong));
    }
  });
}

TEST(MeshGroups, LeaveRanksOutsideAlone) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    if (mesh.contains_this_rank()) check_all_groups(mesh);
  });
}

TEST(MeshGroups, GivenOnesStayAndOthersComeFromTheCurrentGroup) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh made = init_device_mesh("cpu", {2, 2});
    const DeviceMesh mesh =
        DeviceMesh::from_groups(made.get_all_groups(), "cpu", at::arange(4).view({2, 2}), {"a", "b"});
    EXPECT_EQ(mesh.get_all_groups(), made.get_all_groups());
    check_all_groups(mesh);
  });
}

TEST(MeshGroups, HaveTheBackendThatTheirAxisTells) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    for (const DeviceMesh& each : {mesh, mesh["tp"], mesh.flatten("all")}) {
      for (int64_t axis = 0; axis < each.ndim(); ++axis) {
        const std::string before = each.backend(axis);
        EXPECT_EQ(before, each.get_group(axis)->getBackendName());
        EXPECT_EQ(before, each.backend(axis));
        EXPECT_FALSE(before.empty());
      }
    }
    EXPECT_THROW(mesh.backend(2), c10::IndexError);
  });
}

}  // namespace
}  // namespace serried
