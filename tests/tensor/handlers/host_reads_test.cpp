// Values of DTensors that the host reads: the same on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

TEST(HostReads, ItemReducesWhatIsPending) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor x = at::full({1}, 5.0);
      for (const Placements& placements : all_placements(1, shape.size(), true)) {
        EXPECT_FLOAT_EQ(place(x, mesh, placements).item<float>(), 5) << to_string(placements);
      }
    });
  }
}

TEST(HostReads, ItemOfASumOverShards) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    EXPECT_EQ(place(at::arange(6, at::kLong), mesh, {Shard(0)}).sum().item<int64_t>(), 15);
  });
}

TEST(HostReads, AMismatchNamesItemBeforeItsCollective) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const at::Tensor loss = DTensor::from_local(at::ones({}), mesh, {Partial()});
    const at::Tensor x = at::ones({5});
    const auto differ = [&] { group->getRank() == 0 ? void(loss.item<float>()) : all_reduce_(x, mesh.get_group(0)); };
    EXPECT_THAT(
        error_text<c10::DistBackendError>(differ),
        ::testing::ContainsRegex("rank 0 item\\(\\): #[0-9]+ all_reduce f32\\[\\] sum, rank 1 #[0-9]+ all_reduce "
                                 "f32\\[5\\] sum"));
  });
}

TEST(HostReads, EqualIsFalseEverywhereWhereOnePartDiffers) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor x = at::arange(12.).view({6, 2});
      at::Tensor y = x.clone();
      y[5][1] = 0;
      for (const Placements& a : all_placements(2, shape.size(), false)) {
        const Placements b(shape.size(), Shard(0));
        EXPECT_TRUE(at::equal(place(x, mesh, a), place(x, mesh, b))) << to_string(a);
        EXPECT_FALSE(at::equal(place(x, mesh, a), place(y, mesh, b))) << to_string(a);
      }
    });
  }
}

TEST(HostReads, EqualLooksAtSizes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    EXPECT_FALSE(at::equal(place(at::ones({4}), mesh, {Shard(0)}), place(at::ones({5}), mesh, {Shard(0)})));
  });
}

// A sub-mesh must not wait for ranks outside it.
TEST(HostReads, EqualAsksTheMeshOnly) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    if (!mesh.contains_this_rank()) return;
    const at::Tensor x = at::arange(5.);
    EXPECT_TRUE(at::equal(place(x, mesh, {Shard(0)}), place(x, mesh, {Replicate()})));
  });
}

TEST(HostReads, AllcloseHasItsTolerances) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = at::arange(10.);
    const at::Tensor far = place(x + 0.1, mesh, {Shard(0), Replicate()});
    const at::Tensor near = place(x + 1e-9, mesh, {Replicate(), Shard(0)});
    EXPECT_TRUE(at::allclose(place(x, mesh, {Shard(0), Shard(0)}), near));
    EXPECT_FALSE(at::allclose(place(x, mesh, {Shard(0), Shard(0)}), far));
    EXPECT_TRUE(at::allclose(place(x, mesh, {Shard(0), Shard(0)}), far, 0, 0.2));
  });
}

TEST(HostReads, SizesAreGlobal) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::ones({6}), mesh, {Shard(0)});
    EXPECT_TRUE(at::is_same_size(x, place(at::ones({6}), mesh, {Replicate()})));
    EXPECT_FALSE(at::is_same_size(x, place(at::ones({2}), mesh, {Replicate()})));
    EXPECT_FALSE(x.is_pinned());
  });
}

TEST(HostReads, ATruthDecidesTheSameBranchOnAllRanks) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(at::tensor({0., 0., 0., 1.}), mesh, {Shard(0)});
    EXPECT_TRUE((x > 0).any().item<bool>());
    EXPECT_FALSE((x > 0).all().item<bool>());
  });
}

}  // namespace
}  // namespace serried::testing
