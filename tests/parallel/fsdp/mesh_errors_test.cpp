// Meshes that do not fit fully_shard, and blocks of different sizes that ranks take for each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/parallel/tensor_parallel/parallelize.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using torch::nn::Linear;

TEST(FullyShardMeshErrors, RanksOutsideOfTheMeshAreTold) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh two = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    Linear layer(3, 4);
    if (two.contains_this_rank()) return;
    for (const auto& call :
         std::vector<std::function<void()>>{[&] { fully_shard(*layer, {.mesh = two}); },
                                            [&] {
                                              parallelize_module(*layer, two, {{"", ColwiseParallel()}});
                                            }}) {
      EXPECT_THAT(error_text<c10::ValueError>(call),
                  HasSubstr("rank 2 is not in mesh dp=2 of ranks [0,1]\n"
                            "  fix: call it on the ranks of the mesh only: if (mesh.contains_this_rank()) ..."));
    }
    EXPECT_FALSE(layer->weight.is_meta());
  });
}

TEST(FullyShardMeshErrors, AnAxisThatIsNotThereIsNamed) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp", "tp"}, {.group = group});
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*Linear(3, 4), {.mesh = mesh["fsdp"]}); }),
                HasSubstr("mesh dp=1 tp=2 has no axis \"fsdp\""));
  });
}

TEST(FullyShardMeshErrors, TheRanksOfTensorParallelAreNotThoseToShardOver) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp", "tp"}, {.group = group});
    Linear layer(3, 4);
    parallelize_module(*layer, mesh["tp"], {{"", ColwiseParallel()}});
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*layer, {.mesh = mesh["tp"]}); }),
                HasSubstr("[fully_shard] weight f32[4,3] S0 on mesh tp=2 belongs to tensor parallel over these ranks, "
                          "who compute parts of one batch\n"
                          "  fix: shard over another axis of one mesh, whose ranks have batches of their own: "
                          "mesh[\"dp\"]"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*layer, {.mesh = mesh}); }),
                HasSubstr("[concatenate] the name \"tp\" is given to two axes"));
    const DeviceMesh other = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    const std::string text = error_text<c10::ValueError>([&] { fully_shard(*layer, {.mesh = other}); });
    EXPECT_THAT(text, HasSubstr("mesh tp=2 and mesh dp=2 are not of one root"));
    EXPECT_THAT(text, HasSubstr("while fully_shard cut weight over mesh dp=2"));
    // Nothing has been changed.
    EXPECT_EQ(to_string(DTensor(layer->weight).placements()), "S0");
    EXPECT_NO_THROW(fully_shard(*layer, {.mesh = mesh["dp"]}));
    EXPECT_NO_THROW(layer(torch::ones({2, 3})).sum().backward());
  });
}

TEST(FullyShardMeshErrors, RanksThatRunBlocksOfDifferentSizesLearnTheirNames) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Sequential net(Linear(3, 4), Linear(3, 400));
    for (const auto& layer : *net) fully_shard(*layer.ptr());
    fully_shard(*net);
    const size_t mine = group->getRank();
    const at::NoGradGuard no_grad;
    const std::string text = error_text<c10::Error>([&] {
      net->ptr<torch::nn::LinearImpl>(mine)->forward(torch::ones({1, 3}));
    });
    EXPECT_THAT(text, HasSubstr(c10::str("while block ", mine, " \"", mine,
                                         "\" (torch::nn::LinearImpl: weight, bias) was gathered")));
  });
}

}  // namespace
}  // namespace serried::testing
