// What a mesh refuses, each message whole.
#include "serried/mesh/mesh.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using testing::error_text;
using testing::fake_group;

DeviceMesh grid() {
  return init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = fake_group(0, 5)});
}

template <class Fn>
std::string value_error(Fn&& fn) {
  return error_text<c10::ValueError>(std::forward<Fn>(fn));
}

std::string init_error(const std::string& device, const Sizes& shape, const std::vector<std::string>& names) {
  return value_error([&] { init_device_mesh(device, shape, names, {.group = fake_group(0, 4)}); });
}

std::string ranks_error(const at::Tensor& ranks) {
  return value_error([&] { DeviceMesh("cpu", ranks, {}, {.group = fake_group(0, 4)}); });
}

TEST(MeshErrors, DeviceType) {
  EXPECT_EQ(init_error("cpu:0", {4}, {}),
            "[init_device_mesh] device type \"cpu:0\" has an index\n"
            "  fix: pass \"cpu\" or \"cuda\"; which device a rank uses is its own affair");
  EXPECT_EQ(init_error("tpu", {4}, {}),
            "[init_device_mesh] unknown device type \"tpu\"\n"
            "  fix: pass \"cpu\" or \"cuda\"; which device a rank uses is its own affair");
}

TEST(MeshErrors, Names) {
  EXPECT_EQ(init_error("cpu", {2, 2}, {"dp"}),
            "[init_device_mesh] the mesh has 2 axes, but 1 name: dp\n"
            "  fix: pass one name per axis, or none at all");
  EXPECT_EQ(init_error("cpu", {2, 2}, {"dp", "dp"}),
            "[init_device_mesh] the name \"dp\" is given to two axes\n"
            "  fix: name each axis differently");
  EXPECT_EQ(init_error("cpu", {2, 2}, {"dp", ""}),
            "[init_device_mesh] an axis has an empty name\n"
            "  fix: name every axis, or none");
}

TEST(MeshErrors, Shape) {
  EXPECT_EQ(init_error("cpu", {2, 4}, {}),
            "[init_device_mesh] the mesh 2x4 has 8 ranks, but the group has 4\n"
            "  fix: use a smaller mesh, or start more ranks");
  EXPECT_EQ(init_error("cpu", {2, 0}, {}),
            "[init_device_mesh] the shape 2x0 has an axis of 0\n"
            "  fix: pass 1 or more for every axis");
  EXPECT_EQ(init_error("cpu", {}, {}),
            "[init_device_mesh] the shape has no axis\n"
            "  fix: pass {n} for a mesh of one axis");
}

TEST(MeshErrors, Ranks) {
  EXPECT_EQ(ranks_error(at::tensor({0, 1, 0}, at::kLong)),
            "[DeviceMesh] rank 0 is listed twice\n"
            "  fix: list each rank once");
  EXPECT_EQ(ranks_error(at::tensor({0, 4}, at::kLong)),
            "[DeviceMesh] rank 4 is not in 0..3\n"
            "  fix: list ranks of the mesh's group");
  EXPECT_EQ(ranks_error(at::arange(6).view({2, 3})),
            "[DeviceMesh] the mesh 2x3 has 6 ranks, but the group has 4\n"
            "  fix: use a smaller mesh, or start more ranks");
  for (const at::Tensor& bad : {at::Tensor(), at::ones({2}), at::ones({}, at::kLong), at::empty({0}, at::kLong)}) {
    EXPECT_EQ(ranks_error(bad),
              "[DeviceMesh] the ranks are not a tensor of integers with one dim or more and some element\n"
              "  fix: pass at::arange(4).view({2, 2}), or the like");
  }
}

TEST(MeshErrors, NoCurrentGroup) {
  EXPECT_EQ(value_error([] { init_device_mesh("cpu", {1}); }),
            "[init_device_mesh] this thread has no current group\n"
            "  fix: keep a ProcessGroupGuard guard(group) alive around the call, or pass the group");
}

TEST(MeshErrors, Axes) {
  const DeviceMesh mesh = grid();
  EXPECT_EQ(value_error([&] { mesh["cp"]; }),
            "[axis] mesh dp=2 tp=2 has no axis \"cp\"\n"
            "  fix: pass one of dp tp");
  EXPECT_EQ(value_error([&] { init_device_mesh("cpu", {4}, {}, {.group = fake_group(0, 4)})["cp"]; }),
            "[axis] mesh 4 has no axis \"cp\"\n"
            "  fix: give the mesh names, or pass the axis' number");
  EXPECT_EQ(error_text<c10::IndexError>([&] { mesh.get_group(2); }),
            "[get_group] axis 2 of mesh dp=2 tp=2\n"
            "  fix: pass an axis in 0..1");
  EXPECT_EQ(error_text<c10::IndexError>([&] { mesh.size(-1); }),
            "[size] axis -1 of mesh dp=2 tp=2\n"
            "  fix: pass an axis in 0..1");
  EXPECT_EQ(value_error([&] { mesh.get_group(); }),
            "[get_group] mesh dp=2 tp=2 has 2 axes and none was named\n"
            "  fix: pass the axis, by name or by number");
  EXPECT_EQ(value_error([&] { mesh.get_local_rank(); }),
            "[get_local_rank] mesh dp=2 tp=2 has 2 axes and none was named\n"
            "  fix: pass the axis, by name or by number");
  for (const Sizes& axes : std::vector<Sizes>{{1, 0}, {0, 0}}) {
    EXPECT_EQ(value_error([&] { mesh.get_merged_group(axes); }),
              c10::str("[get_merged_group] axes [", axes[0], ", 0] of mesh dp=2 tp=2\n",
                       "  fix: pass one or more axes in ascending order, each once"));
  }
}

TEST(MeshErrors, RankOutside) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = fake_group(4, 5)});
  EXPECT_EQ(value_error([&] { mesh.get_group(0); }),
            "[get_group] rank 4 is not in mesh dp=2 tp=2\n"
            "  fix: ask contains_this_rank() first");
  EXPECT_EQ(value_error([&] {
              mesh.get_merged_group({0, 1});
            }),
            "[get_merged_group] rank 4 is not in mesh dp=2 tp=2\n"
            "  fix: ask contains_this_rank() first");
  EXPECT_EQ(value_error([&] { mesh.get_local_rank("tp"); }),
            "[get_local_rank] rank 4 is not in mesh tp=2\n"
            "  fix: ask contains_this_rank() first");
}

TEST(MeshErrors, Slices) {
  const DeviceMesh mesh = grid();
  EXPECT_EQ(value_error([&] {
              mesh.slice({"tp", "dp"});
            }),
            "[slice] \"tp dp\" is not the order of the axes in mesh dp=2 tp=2\n"
            "  fix: list the names in the mesh's order: dp tp");
  EXPECT_EQ(value_error([&] {
              mesh.slice({"tp", "tp"});
            }),
            "[slice] the name \"tp\" is given to two axes\n"
            "  fix: name each axis differently");
  EXPECT_EQ(value_error([&] { mesh.slice({}); }),
            "[slice] no names were given\n"
            "  fix: pass one or more names of axes");
  mesh.flatten("all");
  EXPECT_EQ(value_error([&] {
              mesh.slice({"all", "tp"});
            }),
            "[slice] the axes all=4 tp=2 overlap: some rank would stand at two places\n"
            "  fix: take axes that have nothing in common");
}

TEST(MeshErrors, Flatten) {
  const DeviceMesh mesh = grid();
  EXPECT_EQ(value_error([&] { mesh.flatten("tp"); }),
            "[flatten] the mesh has an axis \"tp\" already\n"
            "  fix: pass a name that no axis has");
  mesh["dp"].flatten("flat");
  EXPECT_EQ(value_error([&] { mesh.flatten("flat"); }),
            "[flatten] \"flat\" is the name of another flattened mesh, of the ranks 0 2\n"
            "  fix: pass another name");
  EXPECT_EQ(value_error([&] {
              init_device_mesh("cpu", {2, 2}, {}, {.group = fake_group(0, 4)}).flatten();
            }),
            "[flatten] mesh 2x2 has no names\n"
            "  fix: name its axes where it is made: {\"dp\", \"tp\"}");
}

TEST(MeshErrors, Unflatten) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 3}, {"a", "b", "c"}, {.group = fake_group(0, 12)});
  EXPECT_EQ(value_error([&] { mesh.unflatten(3, {2}, {"x"}); }),
            "[unflatten] axis 3 of mesh a=2 b=2 c=3\n"
            "  fix: pass an axis in 0..2");
  EXPECT_EQ(value_error([&] {
              mesh.unflatten(2, {2, 2}, {"x", "y"});
            }),
            "[unflatten] sizes 2x2 do not make the 3 ranks of axis 2 of mesh a=2 b=2 c=3\n"
            "  fix: pass sizes whose product is 3");
  EXPECT_EQ(value_error([&] {
              mesh.unflatten(2, {0, 3}, {"x", "y"});
            }),
            "[unflatten] sizes 0x3 do not make the 3 ranks of axis 2 of mesh a=2 b=2 c=3\n"
            "  fix: pass sizes whose product is 3");
  EXPECT_EQ(value_error([&] {
              mesh.unflatten(2, {3, 1}, {"x"});
            }),
            "[unflatten] 2 sizes and 1 names for an axis of mesh a=2 b=2 c=3\n"
            "  fix: pass one name per size");
  EXPECT_EQ(value_error([&] {
              mesh.unflatten(2, {3, 1}, {"x", ""});
            }),
            "[unflatten] an axis has an empty name\n"
            "  fix: name every axis, or none");
  EXPECT_EQ(value_error([&] {
              mesh.unflatten(2, {3, 1}, {"x", "a"});
            }),
            "[unflatten] the name \"a\" is given to two axes\n"
            "  fix: name each axis differently");
  EXPECT_EQ(
      value_error([&] { init_device_mesh("cpu", {4}, {}, {.group = fake_group(0, 4)}).unflatten(0, {4}, {"x"}); }),
      "[unflatten] 1 sizes and 1 names for an axis of mesh 4\n"
      "  fix: pass no names: the mesh has none");
  EXPECT_EQ(value_error([&] {
              mesh.slice({"a", "c"}).flatten().unflatten(0, {3, 2}, {"x", "y"});
            }),
            "[unflatten] axis 0 of mesh a_c=6 was flattened from axes that 3x2 does not follow\n"
            "  fix: use the sizes it was flattened from, or factors of them");
}

TEST(MeshErrors, Concatenate) {
  const DeviceMesh mesh = grid();
  EXPECT_EQ(value_error([] { DeviceMesh::concatenate({}); }),
            "[concatenate] no meshes were given\n"
            "  fix: pass one or more");
  EXPECT_EQ(value_error([&] {
              DeviceMesh::concatenate({mesh["dp"], grid()["tp"]});
            }),
            "[concatenate] mesh dp=2 and mesh tp=2 are not of one root\n"
            "  fix: pass meshes that were cut from one mesh");
  EXPECT_EQ(value_error([&] {
              DeviceMesh::concatenate({mesh.flatten("all"), mesh["tp"]});
            }),
            "[concatenate] the axes all=4 tp=2 overlap: some rank would stand at two places\n"
            "  fix: take axes that have nothing in common");
  const DeviceMesh unnamed = init_device_mesh("cpu", {2, 2}, {}, {.group = fake_group(0, 4)});
  EXPECT_EQ(value_error([&] {
              DeviceMesh::concatenate({unnamed, unnamed.flatten("all")});
            }),
            "[concatenate] some axes have names and some have none\n"
            "  fix: name all axes, or none");
}

TEST(MeshErrors, GivenGroups) {
  const auto from = [](const std::vector<Group>& groups, const at::Tensor& ranks) {
    return value_error([&] { DeviceMesh::from_groups(groups, "cpu", ranks, {}); });
  };
  EXPECT_EQ(value_error([] { DeviceMesh::from_group({}); }),
            "[from_group] the group is null\n"
            "  fix: pass a group that holds this rank");
  EXPECT_EQ(from({}, at::arange(4)),
            "[from_groups] 0 groups for the 1 axes of the mesh 4\n"
            "  fix: pass one group per axis");
  EXPECT_EQ(from({fake_group(0, 2), {}}, at::arange(4).view({2, 2})),
            "[from_groups] group 1 is null\n"
            "  fix: pass one group per axis");
  EXPECT_EQ(from({fake_group(0, 2), fake_group(0, 2)}, at::arange(6).view({2, 3})),
            "[from_groups] group 1 has 2 ranks, but axis 1 of the mesh 2x3 has 3\n"
            "  fix: pass the groups in the order of the axes");
  EXPECT_EQ(value_error([] {
              DeviceMesh::from_groups({fake_group(0, 2), fake_group(1, 2)}, "cpu", at::arange(4).view({2, 2}), {})
                  .get_merged_group({0, 1});
            }),
            "[get_group] the mesh was made of given groups, none of which holds the ranks 0 1 2 3\n"
            "  fix: keep a ProcessGroupGuard of the group of all ranks alive where from_groups is called");
  const ProcessGroupGuard guard(fake_group(2, 4));
  EXPECT_EQ(from({fake_group(0, 2), fake_group(1, 2)}, at::arange(4).view({2, 2})),
            "[from_groups] by its groups this is rank 1 of the mesh, but in the current group it is rank 2\n"
            "  fix: list the ranks of the current group in the order of the axes' groups");
}

TEST(MeshErrors, AnotherOrderOfRanksNeedsAGroupOfOurs) {
  const auto plain = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  const DeviceMesh mesh("cpu", at::tensor({1, 0}, at::kLong), {}, {.group = plain});
  EXPECT_EQ(value_error([&] { mesh.get_group(); }),
            "[get_group] ranks 1 0 do not ascend, and the mesh's group was not made by new_group\n"
            "  fix: make the mesh over a group of new_group, or with ascending ranks along every axis");
}

}  // namespace
}  // namespace serried
