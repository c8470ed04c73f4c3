// parallelize_module: what patterns match, what becomes of the rest, and what it refuses.
#include "serried/parallel/tensor_parallel/parallelize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
namespace nn = torch::nn;

struct MlpImpl : nn::Module {
  MlpImpl() {
    fc1 = register_module("fc1", nn::Linear(6, 8));
    act = register_module("act", nn::GELU());
    fc2 = register_module("fc2", nn::Linear(8, 6));
    register_buffer("scale", at::full({6}, 2.0));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(act(fc1(x))) * named_buffers()["scale"]; }
  nn::Linear fc1{nullptr}, fc2{nullptr};
  nn::GELU act{nullptr};
};
TORCH_MODULE(Mlp);

struct NetImpl : nn::Module {
  NetImpl() {
    blocks = register_module("blocks", nn::Sequential());
    for (int i = 0; i < 12; ++i) blocks->push_back(Mlp());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  }
  nn::Sequential blocks{nullptr};
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net);

std::string placement_of(const nn::Module& net, const std::string& name) {
  return to_string(DTensor(net.named_parameters()[name]).placements());
}

TEST(ParallelizeModule, EachNameOfAPathIsMatchedByItself) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net;
    parallelize_module(*net, mesh,
                       {{"blocks.[0-2].fc1", ColwiseParallel()},
                        {"blocks.1?.fc?", ColwiseParallel()},
                        {"blocks.3.*2", RowwiseParallel()}});
    for (int i : {0, 1, 2, 10, 11}) EXPECT_EQ(placement_of(*net, c10::str("blocks.", i, ".fc1.weight")), "S0") << i;
    for (int i : {3, 4, 9}) EXPECT_EQ(placement_of(*net, c10::str("blocks.", i, ".fc1.weight")), "R") << i;
    for (int i : {10, 11}) EXPECT_EQ(placement_of(*net, c10::str("blocks.", i, ".fc2.weight")), "S0") << i;
    EXPECT_EQ(placement_of(*net, "blocks.3.fc2.weight"), "S1");
    EXPECT_EQ(placement_of(*net, "blocks.3.fc2.bias"), "R");
    EXPECT_EQ(placement_of(*net, "blocks.0.fc2.weight"), "R");
    EXPECT_EQ(placement_of(*net, "norm.weight"), "R");
    for (const auto& buffer : net->named_buffers()) EXPECT_TRUE(is_dtensor(buffer.value())) << buffer.key();
    EXPECT_TRUE(is_dtensor(net->blocks->ptr<MlpImpl>(0)->forward(at::ones({2, 6}))));
  });
}

TEST(ParallelizeModule, APatternThatMatchesNothingNamesTheNearest) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Net net;
    const std::string at_rank = "\n  at:  rank " + std::to_string(mesh.get_rank()) + "/2";
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                parallelize_module(*net, mesh, {{"norm", SequenceParallel()}, {"blocks.0.fc3", ColwiseParallel()}});
              }),
              "[parallelize_module] the pattern \"blocks.0.fc3\" matches no module; nearest are \"blocks.0.fc1\", "
              "\"blocks.0.fc2\", \"blocks.0.act\"\n"
              "  fix: name modules as named_modules() does; * stays within one name, \"\" is the module itself" +
                  at_rank);
    EXPECT_FALSE(is_dtensor(net->norm->weight)) << "nothing is changed";
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  parallelize_module(*net, mesh, {{"*.fc1", ColwiseParallel()}});
                }),
                HasSubstr("the pattern \"*.fc1\" matches no module"));
    nn::Linear alone(2, 2);
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  parallelize_module(*alone, mesh, {{"a", ColwiseParallel()}});
                }),
                HasSubstr("matches no module; the module has no modules inside"));
  });
}

TEST(ParallelizeModule, AModuleHasOneStyle) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    Mlp net;
    parallelize_module(*net, mesh, {{"fc1", ColwiseParallel()}});
    const std::string at_rank = "\n  at:  rank " + std::to_string(mesh.get_rank()) + "/2";
    EXPECT_EQ(
        error_text<c10::ValueError>([&] {
          parallelize_module(*net, mesh, {{"fc1", ColwiseParallel()}});
        }),
        "[parallelize_module] \"fc1\" (torch::nn::LinearImpl) has a style already, and ColwiseParallel is another "
        "one\n  fix: name a module once, in one plan: patterns may not overlap" +
            at_rank);
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                parallelize_module(*net, mesh, {{"fc2", RowwiseParallel()}});
              }),
              "[parallelize_module] a parameter of \"fc2\" (torch::nn::LinearImpl) is \"R\" on mesh 2 already, and "
              "RowwiseParallel wants \"S1\" on mesh 2\n"
              "  fix: parallelise a module once, by one plan that names all of its parts; weights that are shared need "
              "styles that place them alike, such as RowwiseParallel on the embedding and ColwiseParallel on the head" +
                  at_rank);
    Mlp other;
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  parallelize_module(*other, mesh, {{"fc?", ColwiseParallel()}, {"fc1", ColwiseParallel()}});
                }),
                HasSubstr("has a style already"));
  });
}

TEST(ParallelizeModule, AStyleNamesTheModuleItDoesNotKnow) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const std::string at_rank = "\n  at:  rank " + std::to_string(mesh.get_rank()) + "/2";
    const auto refusal = [&](const std::string& pattern, const ParallelStyle& style) {
      Net net;
      return error_text<c10::NotImplementedError>([&] { parallelize_module(*net, mesh, {{pattern, style}}); });
    };
    EXPECT_THAT(refusal("blocks.0.act", ColwiseParallel()),
                HasSubstr("[parallelize_module] ColwiseParallel does not know \"blocks.0.act\" (torch::nn::GELUImpl), "
                          "only Linear, Embedding and MultiheadAttention with one size for queries, keys and values\n"
                          "  fix: name the Linear or Embedding modules within it, or place its parameters by a style "
                          "of your own: a struct with void apply(torch::nn::Module&, const DeviceMesh&) const"));
    EXPECT_THAT(refusal("norm", RowwiseParallel()),
                HasSubstr("RowwiseParallel does not know \"norm\" (torch::nn::LayerNormImpl), only Linear and "
                          "Embedding\n  fix: name the Linear or Embedding modules within it, such as \"out_proj\""));
    EXPECT_EQ(refusal("blocks.0.fc1", SequenceParallel({.dim = 0})),
              "[parallelize_module] SequenceParallel does not know \"blocks.0.fc1\" (torch::nn::LinearImpl), only "
              "LayerNorm, GroupNorm and Dropout\n"
              "  fix: leave it out of the plan, then its parameters are Replicate, and mark its input: constrain(x, "
              "{Shard(0)})" +
                  at_rank);
    EXPECT_THAT(refusal("", PrepareModuleOutput({.desired = {Replicate()}})),
                HasSubstr("fix: mark the place in forward: constrain(y, placements)"));
    EXPECT_THAT(refusal("blocks.0.act", PrepareModuleInput({.desired = {Replicate()}})),
                HasSubstr("fix: mark the place in forward: constrain(x, placements)"));
  });
}

TEST(ParallelizeModule, TheMeshHasOneAxis) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    Mlp net;
    EXPECT_EQ(error_text<c10::ValueError>([&] { parallelize_module(*net, mesh, {}); }),
              "[parallelize_module] mesh 2x2 has 2 axes, and styles cut over one\n"
              "  fix: pass a mesh of one axis; give the axes names to pick one of them\n  at:  rank " +
                  std::to_string(mesh.get_rank()) + "/4");
    const DeviceMesh named = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = mesh.root_group()});
    EXPECT_THAT(error_text<c10::ValueError>([&] { parallelize_module(*net, named, {}); }),
                HasSubstr("mesh dp=2 tp=2 has 2 axes, and styles cut over one\n  fix: pass one axis of it, such as "
                          "mesh[\"tp\"]"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { parallelize_module(*net, named["cp"], {}); }), HasSubstr("cp"));
  });
}

TEST(ParallelizeModule, OptionsAreChecked) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    nn::Linear linear(4, 8);
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  parallelize_module(*linear, mesh, {{"", ColwiseParallel({.fused = 3})}});
                }),
                HasSubstr("ColwiseParallel has fused = 3, and the module (torch::nn::LinearImpl) has 8 outputs\n  fix: "
                          "pass the number of equal projections that stand side by side in the weight, 3 for q, k, v"));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  parallelize_module(*linear, mesh, {{"", RowwiseParallel({.output = {Shard(1), Replicate()}})}});
                }),
                HasSubstr("RowwiseParallel has 2 placements as output: \"S1 R\", and its mesh has one axis"));
    parallelize_module(*linear, mesh, {{"", RowwiseParallel({.output = {Shard(3)}})}});
    EXPECT_THROW(linear(at::ones({2, 2})), c10::IndexError) << "of a dim that the output does not have";
  });
}

TEST(ParallelizeModule, AModuleInTwoPlacesIsOneModule) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    struct Twice : nn::Module {
      Twice() {
        register_module("a", linear);
        register_module("b", linear);
      }
      nn::Linear linear{4, 4};
    } net;
    EXPECT_NO_THROW(parallelize_module(net, mesh, {{"?", ColwiseParallel()}}));
    EXPECT_EQ(to_string(DTensor(net.linear->weight).placements()), "S0");
  });
}

}  // namespace
}  // namespace serried::testing
