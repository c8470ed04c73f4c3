// Meshes as values: shape, names, coordinates, sub-meshes, identity. Fake groups suffice, nothing is sent.
#include "serried/mesh/mesh.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <thread>

#include "tests/support/fake_group.h"

namespace serried {
namespace {

using testing::fake_group;
using Ranks = std::vector<int64_t>;
using Names = std::vector<std::string>;

DeviceMesh mesh_of(int rank, const Sizes& shape, const Names& names = {}) {
  int64_t size = 1;
  for (int64_t length : shape) size *= length;
  return init_device_mesh("cpu", shape, names, {.group = fake_group(rank, int(size))});
}

TEST(Mesh, KnowsItsShapeAndThisRanksPlace) {
  const Group group = fake_group(5, 6);
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 3}, {"dp", "tp"}, {.group = group});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.size(1), 3);
  EXPECT_EQ(mesh.shape(), (Sizes{2, 3}));
  EXPECT_EQ(mesh.dim_names(), (Names{"dp", "tp"}));
  EXPECT_EQ(mesh.device_type(), "cpu");
  EXPECT_TRUE(mesh.ranks().equal(at::arange(6).view({2, 3})));
  EXPECT_EQ(mesh.rank_list(), (Ranks{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(mesh.axis("tp"), 1);
  EXPECT_EQ(mesh.root_group(), group);
  EXPECT_EQ(mesh.get_rank(), 5);
  EXPECT_EQ(mesh.get_coordinate(), (Ranks{1, 2}));
  EXPECT_EQ(mesh.get_local_rank("dp"), 1);
  EXPECT_EQ(mesh.get_local_rank(1), 2);
  EXPECT_EQ(mesh.position().mesh_shape, at::IntArrayRef({2, 3}));
  EXPECT_EQ(mesh.position().coordinate, at::IntArrayRef({1, 2}));
}

TEST(Mesh, HasOneText) {
  EXPECT_EQ(mesh_of(0, {2, 4}, {"dp", "tp"}).to_string(), "mesh dp=2 tp=4");
  EXPECT_EQ(mesh_of(0, {2, 4}).to_string(), "mesh 2x4");
  std::ostringstream out;
  out << mesh_of(0, {3}, {"x"});
  EXPECT_EQ(out.str(), "mesh x=3");
}

TEST(Mesh, TakesRanksInAnyOrderAndLeavesRanksOut) {
  const at::Tensor ranks = at::tensor({6, 2, 0, 4}, at::kLong).view({2, 2});
  const DeviceMesh mesh("cuda", ranks.to(at::kInt), {"a", "b"}, {.group = fake_group(0, 8)});
  EXPECT_TRUE(mesh.ranks().equal(ranks));
  EXPECT_EQ(mesh.get_coordinate(), (Ranks{1, 0}));
  EXPECT_EQ(mesh.device_type(), "cuda");
  EXPECT_EQ(mesh["a"].rank_list(), (Ranks{6, 0}));
  EXPECT_EQ(mesh["b"].rank_list(), (Ranks{0, 4}));
}

TEST(Mesh, OfTheCurrentGroup) {
  const Group group = fake_group(1, 4);
  const ProcessGroupGuard guard(group);
  EXPECT_EQ(init_device_mesh("cpu", {4}).root_group(), group);
}

TEST(Mesh, ARankOutsideHasNoCoordinate) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = fake_group(4, 5)});
  EXPECT_FALSE(mesh.contains_this_rank());
  EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
  EXPECT_EQ(mesh.get_rank(), 4);
  EXPECT_EQ(mesh.position().coordinate, at::IntArrayRef({0, 0}));
  EXPECT_EQ(mesh["tp"].rank_list(), (Ranks{0, 1}));
  EXPECT_FALSE(mesh["tp"].contains_this_rank());
}

TEST(Mesh, SubMeshesHoldThisRank) {
  for (int rank = 0; rank < 12; ++rank) {
    const DeviceMesh mesh = mesh_of(rank, {2, 3, 2}, {"a", "b", "c"});
    const at::Tensor all = at::arange(12).view({2, 3, 2});
    const Ranks at = *mesh.get_coordinate();
    EXPECT_TRUE(mesh["a"].ranks().equal(all.select(2, at[2]).select(1, at[1])));
    EXPECT_TRUE(mesh["b"].ranks().equal(all.select(2, at[2]).select(0, at[0])));
    EXPECT_TRUE(mesh.slice({"a", "c"}).ranks().equal(all.select(1, at[1])));
    EXPECT_TRUE(mesh.slice({"a", "c"})["c"].ranks().equal(all.select(1, at[1]).select(0, at[0])));
    EXPECT_EQ(mesh.slice({"b", "c"}).get_coordinate(), (Ranks{at[1], at[2]}));
    EXPECT_EQ(mesh["c"].get_local_rank(), at[2]);
    EXPECT_EQ(mesh["c"].get_rank(), rank);
  }
}

TEST(Mesh, TheSameSubMeshHasTheSameId) {
  const DeviceMesh mesh = mesh_of(3, {2, 2}, {"dp", "tp"});
  const DeviceMesh copy = mesh;
  EXPECT_EQ(copy.id(), mesh.id());
  EXPECT_EQ(copy, mesh);
  const uint64_t first = mesh["tp"].id();
  EXPECT_EQ(mesh["tp"].id(), first);
  EXPECT_NE(mesh["dp"].id(), first);
  EXPECT_NE(mesh["dp"], mesh["tp"]);
  EXPECT_EQ(mesh.slice({"dp", "tp"}).id(), mesh.id());
}

TEST(Mesh, EqualContentOverOneGroupIsEqual) {
  const Group group = fake_group(0, 4);
  const DeviceMesh a = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
  const DeviceMesh b = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
  EXPECT_EQ(a, b);
  EXPECT_NE(a.id(), b.id());
  EXPECT_NE(a, init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group}));
  EXPECT_NE(a, init_device_mesh("cuda", {2, 2}, {"dp", "tp"}, {.group = group}));
  EXPECT_NE(a, init_device_mesh("cpu", {4}, {}, {.group = group}));
  EXPECT_NE(a, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = fake_group(0, 4)}));
}

TEST(Mesh, ASubMeshKeepsItsRootAlive) {
  const DeviceMesh sub = mesh_of(1, {2, 2}, {"dp", "tp"})["tp"];
  EXPECT_EQ(sub.rank_list(), (Ranks{0, 1}));
  EXPECT_EQ(sub.get_group()->getRank(), 1);
}

TEST(Mesh, FlattenIsFoundAgainByName) {
  const DeviceMesh mesh = mesh_of(7, {2, 3, 2}, {"dp", "cp", "tp"});
  const DeviceMesh all = mesh.flatten("all");
  EXPECT_EQ(all.shape(), Sizes{12});
  EXPECT_EQ(all.get_coordinate(), Ranks{7});
  EXPECT_EQ(mesh["all"].id(), all.id());
  EXPECT_EQ(mesh.flatten("all").id(), all.id());
  const DeviceMesh sub = mesh.slice({"dp", "tp"});
  const DeviceMesh flat = sub.flatten();
  EXPECT_EQ(flat.dim_names(), Names{"dp_tp"});
  EXPECT_EQ(flat.rank_list(), (Ranks{0, 1, 6, 7}));
  EXPECT_EQ(flat.get_coordinate(), Ranks{3});
  EXPECT_EQ(mesh["dp_tp"].id(), flat.id());
  EXPECT_EQ(sub["dp_tp"].id(), flat.id());
  EXPECT_EQ(mesh.get_local_rank("dp_tp"), 3);
  EXPECT_EQ(mesh.get_group("dp_tp")->getRank(), 3);
}

TEST(Mesh, AFlattenedAxisStandsBesideAnOrdinaryOne) {
  const DeviceMesh mesh = mesh_of(7, {2, 3, 2}, {"dp", "cp", "tp"});
  mesh.slice({"dp", "cp"}).flatten();
  const DeviceMesh pair = mesh.slice({"dp_cp", "tp"});
  EXPECT_EQ(pair.shape(), (Sizes{6, 2}));
  EXPECT_TRUE(pair.ranks().equal(at::arange(12).view({6, 2})));
  EXPECT_EQ(pair.get_coordinate(), (Ranks{3, 1}));
}

TEST(Mesh, FlattenOfOneAxisUnderItsOwnNameIsItself) {
  const DeviceMesh mesh = mesh_of(1, {4}, {"x"});
  EXPECT_EQ(mesh.flatten().id(), mesh.id());
  EXPECT_EQ(mesh.flatten("y").rank_list(), mesh.rank_list());
  EXPECT_EQ(mesh_of(1, {2, 2}).flatten("all").to_string(), "mesh all=4");
}

TEST(Mesh, UnflattenCutsOneAxis) {
  const DeviceMesh mesh = mesh_of(9, {2, 6}, {"dp", "tp"});
  const DeviceMesh cut = mesh.unflatten(1, {3, 2}, {"a", "b"});
  EXPECT_EQ(cut.to_string(), "mesh dp=2 a=3 b=2");
  EXPECT_TRUE(cut.ranks().equal(at::arange(12).view({2, 3, 2})));
  EXPECT_EQ(cut.get_coordinate(), (Ranks{1, 1, 1}));
  EXPECT_EQ(cut.slice({"a", "b"}).flatten("ab").rank_list(), mesh["tp"].rank_list());
  EXPECT_EQ(mesh_of(3, {4}).unflatten(0, {2, 2}, {}).to_string(), "mesh 2x2");
  EXPECT_EQ(mesh.unflatten(0, {2, 1}, {"one", "more"}).shape(), (Sizes{2, 1, 6}));
}

TEST(Mesh, UnflattenOfAFlattenedAxisGoesBack) {
  const DeviceMesh mesh = mesh_of(5, {2, 2, 3}, {"a", "b", "c"});
  const DeviceMesh flat = mesh.slice({"a", "c"}).flatten();
  EXPECT_EQ(flat.unflatten(0, {2, 3}, {"a", "c"}).id(), mesh.slice({"a", "c"}).id());
}

TEST(Mesh, ConcatenateJoinsAxes) {
  const DeviceMesh mesh = mesh_of(7, {2, 3, 2}, {"dp", "cp", "tp"});
  EXPECT_EQ(DeviceMesh::concatenate({mesh["dp"], mesh["tp"]}).id(), mesh.slice({"dp", "tp"}).id());
  const DeviceMesh turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_TRUE(turned.ranks().equal(at::tensor({0, 6, 1, 7}, at::kLong).view({2, 2})));
  EXPECT_EQ(turned.get_coordinate(), (Ranks{1, 1}));
}

TEST(Mesh, OfGivenGroups) {
  const Group world = fake_group(3, 4);
  const DeviceMesh line = DeviceMesh::from_group(world, "cpu", "x");
  EXPECT_EQ(line.to_string(), "mesh x=4");
  EXPECT_EQ(line.get_group(), world);
  EXPECT_EQ(DeviceMesh::from_group(world).to_string(), "mesh 4");
  const std::vector<Group> groups = {fake_group(1, 2), fake_group(0, 3)};
  const DeviceMesh grid = DeviceMesh::from_groups(groups, "cpu", at::arange(6).view({2, 3}), {"a", "b"});
  EXPECT_EQ(grid.get_rank(), 3);
  EXPECT_EQ(grid.get_coordinate(), (Ranks{1, 0}));
  EXPECT_EQ(grid.get_all_groups(), groups);
  EXPECT_EQ(grid["b"].get_group(), groups[1]);
  EXPECT_EQ(grid.backend(1), "fake");
  EXPECT_EQ(grid.flatten("both").backend(0), "") << "no group holds these ranks, and none can be made";
}

TEST(Mesh, GuardsNestAndAreThisThreads) {
  EXPECT_EQ(current_mesh(), std::nullopt);
  const DeviceMesh outer = mesh_of(0, {2});
  const DeviceMesh inner = mesh_of(0, {3});
  {
    const MeshGuard first(outer);
    {
      const MeshGuard second(inner);
      EXPECT_EQ(current_mesh(), inner);
      std::thread([] { EXPECT_EQ(current_mesh(), std::nullopt); }).join();
    }
    EXPECT_EQ(current_mesh(), outer);
  }
  EXPECT_EQ(current_mesh(), std::nullopt);
}

TEST(Mesh, FourThousandRanksAreNoMatter) {
  const DeviceMesh mesh = init_device_mesh("cpu", {16, 16, 16}, {"pp", "dp", "tp"}, {.group = fake_group(4095, 4096)});
  EXPECT_EQ(mesh.size(), 4096);
  EXPECT_EQ(mesh.get_coordinate(), (Ranks{15, 15, 15}));
  EXPECT_EQ(mesh["dp"].rank_list().front(), 15 * 256 + 15);
  EXPECT_EQ(mesh.get_group("pp")->getRank(), 15);
  EXPECT_EQ(mesh.slice({"pp", "dp"}).flatten()["pp_dp"].size(), 256);
}

}  // namespace
}  // namespace serried
