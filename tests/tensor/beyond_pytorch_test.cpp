// What PyTorch 2.13's DTensor gets wrong or refuses, right here: values and gradients against the unsharded program.
#include <functional>

#include "serried/serried.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using at::Tensor;
using Program = std::function<Tensor(const std::vector<Tensor>&)>;

struct Outcome {
  Tensor value;
  std::vector<Tensor> grads;
};

// The program's value, and the gradients of its sum where inputs are floating.
Outcome evaluate(const Program& program, std::vector<Tensor> inputs) {
  std::vector<Tensor> leaves;
  for (Tensor& input : inputs) {
    if (!input.is_floating_point()) continue;
    input = input.detach().requires_grad_();
    leaves.push_back(input);
  }
  const Tensor value = program(inputs);
  Outcome outcome{full(value.detach()), {}};
  if (!value.requires_grad()) return outcome;
  for (const Tensor& grad : torch::autograd::grad({value.sum()}, leaves, {}, {}, false, /*allow_unused=*/true)) {
    outcome.grads.push_back(grad.defined() ? full(grad) : grad);
  }
  return outcome;
}

// On every usual mesh and with every cut of the first input; the others are replicated, or cut alike where `alike`.
void expect_right(const Program& program, const std::vector<Tensor>& inputs, bool alike = true, bool partial = true) {
  const Outcome expected = evaluate(program, inputs);
  for (const Sizes& shape : usual_meshes()) {
    for (const Placements& placements : all_placements(inputs[0].dim(), shape.size(), partial)) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        std::vector<Tensor> placed;
        for (const Tensor& input : inputs) {
          const bool same = alike && input.sizes() == inputs[0].sizes() && input.is_floating_point();
          placed.push_back(place(input, mesh, &input == &inputs[0] || same ? placements : Placements(shape.size())));
        }
        const Outcome outcome = evaluate(program, placed);
        const std::string what = to_string(placements) + " on " + mesh.to_string();
        expect_close(outcome.value, expected.value, what);
        ASSERT_EQ(outcome.grads.size(), expected.grads.size());
        for (size_t i = 0; i < expected.grads.size(); ++i) {
          if (expected.grads[i].defined()) expect_close(outcome.grads[i], expected.grads[i], what + ", gradient");
        }
      });
    }
  }
}

Tensor wave(at::IntArrayRef sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return (at::arange(count, at::kDouble) * 0.7).sin().view(sizes);
}

TEST(BeyondPyTorch, MeanLossesOnCutInputsHaveTheGradientsOfTheWhole) {
  expect_right([](const auto& t) { return torch::mse_loss(t[0], t[1]); }, {wave({5, 3}), wave({5, 3}) * 2});
  expect_right([](const auto& t) { return torch::l1_loss(t[0], t[1]); }, {wave({5, 3}), wave({5, 3}) * 2});
  expect_right([](const auto& t) { return torch::smooth_l1_loss(t[0], t[1]); }, {wave({5, 3}), wave({5, 3}) * 2});
  expect_right([](const auto& t) { return t[0].mean(); }, {wave({5, 3})});
}

TEST(BeyondPyTorch, MeanLossesWithAnEmptyPartAreNoNaN) {
  expect_right([](const auto& t) { return torch::mse_loss(t[0], t[1]); }, {wave({2, 3}), wave({2, 3}) * 2});
  expect_right([](const auto& t) { return t[0].mean(0); }, {wave({1, 3})});
}

TEST(BeyondPyTorch, CrossEntropyMeanWithIgnoreIndexCountsTheWhole) {
  const Tensor target = at::tensor(std::vector<int64_t>{0, -100, 2, 1, -100});
  namespace F = torch::nn::functional;
  expect_right([](const auto& t) { return F::cross_entropy(t[0], t[1]); }, {wave({5, 3}), target});
  // The weights of classes have no gradient, so they come from outside.
  const Tensor weight = at::tensor({0.2, 0.5, 1.5}, at::kDouble);
  expect_right(
      [&](const auto& t) {
        const ImplicitReplication plain_weight;
        return F::cross_entropy(t[0], t[1], F::CrossEntropyFuncOptions().weight(weight));
      },
      {wave({5, 3}), target});
}

TEST(BeyondPyTorch, GatheringAnUnevenlyNestedDimKeepsItsRows) {
  for (int64_t rows : {0, 1, 3, 5, 7}) {
    const Tensor x = wave({rows, 3});
    on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
      mesh.get_merged_group({0, 1});
      expect_equal(place(x, mesh, {Shard(0), Shard(0)}).full_tensor(), x);
    });
  }
}

TEST(BeyondPyTorch, ReductionsWithAnEmptyPartUseTheIdentity) {
  expect_right([](const auto& t) { return t[0].amax(0); }, {wave({2, 3})});
  expect_right([](const auto& t) { return t[0].amin(); }, {wave({2, 3})});
  expect_right([](const auto& t) { return t[0].argmax(0); }, {wave({2, 3})});
  expect_right([](const auto& t) { return t[0].argmax(); }, {wave({3, 2})});
  expect_right([](const auto& t) { return t[0].prod(); }, {wave({2, 3})});
}

TEST(BeyondPyTorch, BatchNormOverACutBatchCountsEveryRow) {
  for (int64_t rows : {2, 5}) {
    expect_right(
        [](const auto& t) {
          return at::batch_norm(t[0], t[1], t[2], {}, {}, /*training=*/true, 0.1, 1e-5, false).square();
        },
        {wave({rows, 3, 2}), wave({3}), wave({3})}, /*alike=*/false);
  }
}

TEST(BeyondPyTorch, FourierTransformsWithAnEmptyPart) {
  expect_right([](const auto& t) { return at::view_as_real(at::fft_fft(t[0], std::nullopt, 0)); }, {wave({2, 3})});
  expect_right([](const auto& t) { return at::fft_irfft(at::fft_rfft(t[0], std::nullopt, 1), 3, 1); }, {wave({2, 3})});
}

TEST(BeyondPyTorch, ViewsAndMatmulsOfUnevenParts) {
  expect_right([](const auto& t) { return t[0].view({6, 5}); }, {wave({3, 2, 5})});
  expect_right([](const auto& t) { return t[0].reshape({15, 2}); }, {wave({3, 2, 5})});
  expect_right([](const auto& t) { return t[0].view({-1}).view({5, 6}); }, {wave({3, 10})});
  expect_right([](const auto& t) { return at::matmul(t[0], t[1]); }, {wave({3, 2, 5}), wave({5, 7})}, false);
  expect_right([](const auto& t) { return at::linear(t[0], t[1], t[2]); }, {wave({3, 2, 5}), wave({7, 5}), wave({7})},
               false);
}

TEST(BeyondPyTorch, BackwardOfSelectScatterAndInfinityNorm) {
  expect_right([](const auto& t) { return t[0].select(0, 1) * 3; }, {wave({5, 3})});
  expect_right([](const auto& t) { return t[0].norm(std::numeric_limits<double>::infinity()); }, {wave({5, 3})});
  const Tensor index = at::tensor(std::vector<int64_t>{0, 2, 1, 4, 0, 3}).view({2, 3});
  expect_right([](const auto& t) { return at::scatter(t[0], 0, t[1], t[2]) * 2; },
               {wave({5, 3}), at::tensor(std::vector<int64_t>{0, 2, 1, 4, 3, 0}).view({2, 3}), wave({2, 3})}, false);
  expect_right([](const auto& t) { return at::scatter_add(t[0], 0, t[1], t[2]).square(); },
               {wave({5, 3}), index, wave({2, 3})}, false);
}

TEST(BeyondPyTorch, ItemOfAPendingSumIsTheSum) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const DTensor x = place(wave({5, 3}), mesh, Placements(shape.size(), Shard(0)));
      EXPECT_NEAR(x.sum().item<double>(), wave({5, 3}).sum().item<double>(), 1e-12);
    });
  }
}

TEST(BeyondPyTorch, LeavingAnInnerScopeKeepsTheOuterOne) {
  EXPECT_FALSE(ImplicitReplication::is_enabled());
  {
    const ImplicitReplication outer;
    { const ImplicitReplication inner; }
    EXPECT_TRUE(ImplicitReplication::is_enabled());
  }
  EXPECT_FALSE(ImplicitReplication::is_enabled());
}

TEST(BeyondPyTorch, UnflattenOfAnEmptyTensor) {
  expect_right([](const auto& t) { return t[0].unflatten(0, {0, 3}); }, {wave({0, 2})});
  expect_right([](const auto& t) { return t[0].view({2, 0, 4}); }, {wave({0, 8})});
}

TEST(BeyondPyTorch, UnbindAlongACutDim) {
  expect_right([](const auto& t) { return t[0].unbind(0)[1]; }, {wave({3, 2})});
}

}  // namespace
}  // namespace serried::testing
