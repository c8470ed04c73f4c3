// Gradients of gradients through pools, pads and resizes of images that are cut along their space.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

struct SecondCase {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> op;
};

const std::vector<SecondCase>& second_cases() {
  static const std::vector<SecondCase> cases = {
      {"average", [](const at::Tensor& x) { return at::avg_pool2d(x, 3, 2, 1); }},
      {"max", [](const at::Tensor& x) { return at::max_pool2d(x, 3, 2, 1); }},
      {"adaptive average",
       [](const at::Tensor& x) {
         return at::adaptive_avg_pool2d(x, {5, 3});
       }},
      {"adaptive max",
       [](const at::Tensor& x) {
         return std::get<0>(at::adaptive_max_pool2d(x, {5, 3}));
       }},
      {"constant pad",
       [](const at::Tensor& x) {
         return at::constant_pad_nd(x, {1, 0, 2, 1});
       }},
      {"reflection pad",
       [](const at::Tensor& x) {
         return at::reflection_pad2d(x, {1, 0, 2, 1});
       }},
      {"replication pad",
       [](const at::Tensor& x) {
         return at::replication_pad2d(x, {1, 0, 2, 1});
       }},
      {"bilinear",
       [](const at::Tensor& x) {
         return at::upsample_bilinear2d(x, {17, 5}, false);
       }},
      {"nearest",
       [](const at::Tensor& x) {
         return at::upsample_nearest2d(x, {17, 5});
       }},
  };
  return cases;
}

// Of the square of the gradient of the loss.
at::Tensor second_gradient(at::Tensor x, const std::function<at::Tensor(const at::Tensor&)>& loss) {
  x = x.detach().requires_grad_();
  const at::Tensor first = torch::autograd::grad({loss(x)}, {x}, {}, true, /*create_graph=*/true)[0];
  return torch::autograd::grad({first.square().sum()}, {x})[0];
}

TEST(CutImages, SecondGradientsAreThoseOfOneProcess) {
  const at::Tensor image = iota({1, 2, 12, 8}).sin();
  for (const SecondCase& each : second_cases()) {
    const auto loss = [&](const at::Tensor& x) { return each.op(x * x).square().sum(); };
    const at::Tensor expected = second_gradient(image, loss);
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor second = second_gradient(place(image, mesh, {Shard(2)}), loss);
      EXPECT_TRUE(is_dtensor(second)) << each.name;
      expect_close(full(second), expected, each.name);
    });
  }
}

// LibTorch's formula makes them up without a look at the image: docs/limits.md.
TEST(CutImages, SecondGradientsThatAreNothingButZerosArePlain) {
  const at::Tensor image = iota({1, 2, 12, 8}).sin();
  for (const size_t i : {0, 1, 2, 3, 5, 6}) {
    const SecondCase& each = second_cases()[i];
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const at::Tensor second =
          second_gradient(place(image, mesh, {Shard(2)}), [&](const at::Tensor& x) { return each.op(x).sum(); });
      expect_equal(second, at::zeros_like(image), each.name);
    });
  }
}

}  // namespace
}  // namespace serried::testing
