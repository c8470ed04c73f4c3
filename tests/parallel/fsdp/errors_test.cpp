// What fully_shard refuses, and what it says.
#include <gtest/gtest.h>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/making/born_sharded.h"
#include "serried/tensor/random/random.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

template <class Exception>
std::string refusal(const std::function<void()>& fn) {
  const std::string text = error_text<Exception>(fn);
  return text.substr(0, text.find("\n  at:"));
}

torch::nn::Linear same_linear() {
  return seeded(1, [] { return torch::nn::Linear(3, 4); });
}

struct Pair : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  Pair() : torch::nn::Module("Pair") {
    a = register_module("a", same_linear());
    b = register_module("b", same_linear());
  }
};

// Uses a tensor that others may use, too.
struct User : torch::nn::Module {
  at::Tensor w;
  explicit User(const at::Tensor& shared) : torch::nn::Module("User") { w = register_parameter("w", shared); }
};

TEST(FullyShardErrors, AModuleIsShardedOnce) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*layer); }),
              "[fully_shard] the module torch::nn::LinearImpl is fully sharded already\n"
              "  fix: call it once per module, layers before the module around them");
    Pair pair;
    fully_shard(*pair.a);
    fully_shard(pair);
    EXPECT_NE(refusal<c10::ValueError>([&] { fully_shard(pair); }).find("the module Pair is fully sharded already"),
              std::string::npos);
  });
}

TEST(FullyShardErrors, AParameterBelongsToOneBlockAndMayBeTiedInsideIt) {
  run_ranks(2, [](const Group&) {
    const at::Tensor shared = torch::ones({4, 2}, at::requires_grad());
    struct Both : torch::nn::Module {
      std::shared_ptr<User> a, b;
      explicit Both(const at::Tensor& w) {
        a = register_module("a", std::make_shared<User>(w));
        b = register_module("b", std::make_shared<User>(w));
      }
    } both(shared);
    fully_shard(*both.a);
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(both); }),
              "[fully_shard] b.w is also a parameter of block 0 (User: w), which does not contain User\n"
              "  fix: shard a module that contains both users of the parameter as one block");
    Both tied(torch::ones({4, 2}, at::requires_grad()));
    fully_shard(tied);
    (tied.a->w * torch::ones({4, 2}) + 2 * tied.b->w * torch::ones({4, 2})).sum().backward();
    expect_equal(DTensor(tied.b->w.grad()).full_tensor(), torch::full({4, 2}, 3.f));
  });
}

TEST(FullyShardErrors, DataParallelAndFullyShardedExcludeEachOther) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    EXPECT_EQ(refusal<c10::ValueError>([&] { DistributedDataParallel ddp(layer, {.process_group = group}); }),
              "[DistributedDataParallel] weight is fully sharded: its gradient is averaged by its block already\n"
              "  fix: drop the wrapper; to average over more ranks give fully_shard a mesh (replicate, shard)");
    torch::nn::Linear other = same_linear();
    DistributedDataParallel ddp(other, {.process_group = group});
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*other); }),
              "[fully_shard] weight belongs to a DistributedDataParallel, which averages it\n"
              "  fix: shard the bare module; for replicas of shards pass a mesh (replicate, shard)");
  });
}

TEST(FullyShardErrors, ZeroTakesNoShardedParameters) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    EXPECT_NE(refusal<c10::ValueError>([&] {
                ZeroRedundancyOptimizer<torch::optim::SGD> zero(layer->parameters(), torch::optim::SGDOptions(0.1),
                                                                {.process_group = group});
              }).find("parameter 0 is a DTensor, f32[4,3] S0"),
              std::string::npos);
  });
}

TEST(FullyShardErrors, CloneAndOtherDtypesAndDataAreRefused) {
  const std::string text =
      "[set_data] the parameter is fully sharded: its memory is part of a block, and set_data(), which the module's "
      "clone() and to() call, would take it out\n"
      "  fix: clone or convert the module before fully_shard; to change values use parameter.copy_(x)";
  run_ranks(2, [&](const Group&) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    EXPECT_EQ(refusal<c10::ValueError>([&] { layer->clone(); }), text);
    EXPECT_EQ(refusal<c10::ValueError>([&] { layer->to(at::kDouble); }), text);
    EXPECT_EQ(refusal<c10::ValueError>([&] { layer->weight.set_data(torch::ones({4, 3})); }), text);
    EXPECT_EQ(layer->weight.scalar_type(), at::kFloat);
  });
}

TEST(FullyShardErrors, SizesDoNotChangeInPlace) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    const at::NoGradGuard no_grad;
    EXPECT_EQ(refusal<c10::ValueError>([&] { layer->weight.t_(); }),
              "[aten::t_] would change the sizes of a parameter that is gathered on use, in place\n"
              "  fix: change the parameter before it is sharded, or use the form that returns a view");
    EXPECT_EQ(refusal<c10::NotImplementedError>([&] { layer->weight.view(at::kInt); }),
              "[aten::view.dtype] a view of other elements than its own, of a parameter [4,3] that is gathered on use\n"
              "  fix: take it of a copy: parameter.clone()");
    EXPECT_NE(refusal<c10::Error>([&] {
                layer->weight.t().data_ptr();
              }).find("[data_ptr] a view of a sharded parameter has no memory of its own"),
              std::string::npos);
  });
}

TEST(FullyShardErrors, RanksThatRunDifferentBlocksLearnBothNames) {
  run_ranks(2, [](const Group& group) {
    Pair pair;
    fully_shard(*pair.a);
    fully_shard(*pair.b);
    fully_shard(pair);
    const std::string a = "block 0 \"a\" (torch::nn::LinearImpl: weight, bias)";
    const std::string b = "block 1 \"b\" (torch::nn::LinearImpl: weight, bias)";
    const bool is_first = group->getRank() == 0;
    const at::NoGradGuard no_grad;
    const std::string text = refusal<c10::ValueError>([&] {
      is_first ? pair.a(torch::ones({1, 3})) : pair.b(torch::ones({1, 3}));
    });
    EXPECT_EQ(text, "[fully_shard] rank " + std::string(is_first ? "1" : "0") + " of the group gathers " +
                        (is_first ? b : a) + " while this rank gathers " + (is_first ? a : b) +
                        "\n  fix: run the same blocks in the same order on every rank");
    // Nothing is left of it.
    EXPECT_EQ(pair.a(torch::ones({1, 3})).sizes(), at::IntArrayRef({1, 4}));
  });
}

TEST(FullyShardErrors, RanksThatReduceDifferentBlocksAreTold) {
  run_ranks(2, [](const Group& group) {
    Pair pair;
    fully_shard(*pair.a, {.reshard_after_forward = false});
    fully_shard(*pair.b, {.reshard_after_forward = false});
    fully_shard(pair);
    const bool is_first = group->getRank() == 0;
    const at::Tensor x = torch::ones({1, 3}), y = pair.a(x).sum(), z = pair.b(x).sum();
    EXPECT_EQ(refusal<c10::ValueError>([&] { (is_first ? y : z).backward(); }),
              std::string("[backward] other ranks reduce the gradients of another block while this rank reduces those "
                          "of block ") +
                  (is_first ? "0 \"a\"" : "1 \"b\"") +
                  " (torch::nn::LinearImpl: weight, bias)\n"
                  "  fix: run the same blocks in the same order on every rank, in backward, too");
    EXPECT_FALSE(pair.a->weight.grad().defined());
  });
}

TEST(FullyShardErrors, MeshesOptionsAndParametersAreChecked) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh cube = init_device_mesh("cpu", {1, 2, 2}, {"x", "y", "z"}, {.group = group});
    torch::nn::Linear layer = same_linear();
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*layer, {.mesh = cube}); }),
              "[fully_shard] mesh x=1 y=2 z=2 has 3 axes\n"
              "  fix: pass one axis that parameters are cut over, or two: (replicate, shard)");
    EXPECT_EQ(refusal<c10::NotImplementedError>(
                  [&] { fully_shard(*layer, {.mixed_precision = {.output_dtype = at::kFloat}}); }),
              "[fully_shard] mixed_precision.output_dtype is Float, and forward of a torch::nn module has no hook to "
              "cast in\n  fix: cast what forward returns: y.to(at::kFloat)");
    EXPECT_EQ(refusal<c10::ValueError>([&] {
                fully_shard(*layer, {.shard_placement_fn = [](const at::Tensor&) { return Placement(Replicate()); }});
              }),
              "[fully_shard] shard_placement_fn gives R for weight\n"
              "  fix: return Shard(dim), or std::nullopt for Shard(0)");
    layer(torch::ones({1, 3})).sum().backward();
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*layer); }),
              "[fully_shard] weight has a gradient already, which no rank has averaged\n"
              "  fix: shard the module before the first backward, or call zero_grad() before");
    layer->zero_grad();
    layer->bias.set_data(layer->bias.to(at::kDouble));
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*layer); }),
              "[fully_shard] weight is Float on cpu and bias Double on cpu: one block is sent by one collective\n"
              "  fix: shard submodules of one dtype by themselves first, or name one in .ignored_params");
    const FullyShardHandle handle = fully_shard(*same_linear());
    EXPECT_EQ(refusal<c10::ValueError>([&] { handle.set_gradient_divide_factor(0); }),
              "[set_gradient_divide_factor] the factor is 0\n"
              "  fix: pass a number above 0, or std::nullopt for the number of ranks");
  });
}

TEST(FullyShardErrors, GradientsThroughPartsAreRefused) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    EXPECT_EQ(refusal<c10::NotImplementedError>([&] { DTensor(layer->weight).full_tensor().sum().backward(); }),
              "[backward] goes through to_local(), redistribute() or full_tensor() of a fully sharded parameter\n"
              "  fix: compute with the parameter itself, which is gathered on use; to read it: "
              "DTensor(parameter.detach())");
  });
}

TEST(FullyShardErrors, SecondDerivativesComeFromGradOnly) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = same_linear();
    fully_shard(*layer);
    const at::Tensor x = torch::ones({1, 3}, at::requires_grad());
    EXPECT_EQ(refusal<c10::NotImplementedError>(
                  [&] { layer(x).square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
              "[backward] with create_graph, and the average of the gradient of bias has no gradient\n"
              "  fix: compute second derivatives by autograd::grad, which gives this rank's own gradients");
    const auto first = torch::autograd::grad({layer(x).square().sum()}, {x}, {}, true, true);
    first[0].square().sum().backward();
    EXPECT_TRUE(is_dtensor(layer->weight.grad()));
  });
}

TEST(FullyShardErrors, ParametersOnMetaAreNamedAtTheirFirstUse) {
  run_ranks(2, [](const Group&) {
    User user(torch::empty({4, 3}, at::TensorOptions().device(at::kMeta).requires_grad(true)));
    fully_shard(user);
    EXPECT_EQ(refusal<c10::Error>([&] {
                torch::nn::functional::linear(torch::ones({1, 3}), user.w);
              }),
              "[fully_shard] parameters are still on the meta device: w of block 0 (User: w)\n"
              "  fix: build the module under BornSharded(mesh, ...), which gives each rank the memory of its part");
  });
}

TEST(FullyShardErrors, ModulesBornShardedAreAdopted) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"dp"}, {.group = group});
    manual_seed(7, mesh);
    torch::nn::Linear born{nullptr}, other{nullptr};
    {
      const BornSharded guard(mesh, [](at::IntArrayRef) -> Placements { return {Shard(0)}; });
      born = torch::nn::Linear(3, 4);
    }
    {
      const BornSharded guard(mesh, [](at::IntArrayRef) -> Placements { return {Replicate()}; });
      other = torch::nn::Linear(3, 4);
    }
    const std::vector<at::Tensor> before = values_of(*born);
    fully_shard(*born, {.mesh = mesh});
    const at::Tensor x = torch::ones({1, 3});
    expect_equal(born(x), torch::nn::functional::linear(x, before[0], before[1]));
    EXPECT_EQ(refusal<c10::ValueError>([&] { fully_shard(*other, {.mesh = mesh}); }),
              "[fully_shard] weight lies as f32[4,3] R on mesh dp=3, not \"S0\"\n"
              "  fix: let it be born in that placement, or name it in .ignored_params");
  });
}

}  // namespace
}  // namespace serried::testing
