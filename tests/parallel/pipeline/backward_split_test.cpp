// The two parts of a backward against the whole of it.
#include "serried/parallel/pipeline/backward_split.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "serried/parallel/recompute.h"
#include "tests/parallel/pipeline/nets.h"

namespace serried::testing {
namespace {

using detail::SplitBackward;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    bias = register_parameter("bias", torch::ones({4}));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor bias;
};
using Forward = std::function<at::Tensor(Net&, const at::Tensor&)>;

void expect_parts_are_the_whole(const Forward& forward) {
  Net whole, split;
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < whole.parameters().size(); ++i) split.parameters()[i].copy_(whole.parameters()[i]);
  }
  const at::Tensor x = staged::values({3, 4}, 1), gradient = staged::values({3, 4}, 2);
  const at::Tensor a = x.clone().requires_grad_(true), b = x.clone().requires_grad_(true);
  forward(whole, a).backward(gradient);
  at::Tensor output = forward(split, b);
  const auto root = torch::autograd::impl::gradient_edge(output);
  output.reset();
  SplitBackward parts(root, gradient, b);
  expect_equal(parts.input_gradient(), a.grad(), "input");
  EXPECT_FALSE(b.grad().defined());
  for (const at::Tensor& parameter : split.parameters()) EXPECT_FALSE(parameter.grad().defined());
  parts.run_weights();
  EXPECT_FALSE(b.grad().defined());
  const auto expected = whole.named_parameters();
  for (const auto& item : split.named_parameters()) {
    if (!expected[item.key()].grad().defined()) {
      EXPECT_FALSE(item.value().grad().defined()) << item.key();
      continue;
    }
    expect_equal(item.value().grad(), expected[item.key()].grad(), item.key());
  }
}

TEST(SplitBackward, PartsAreTheWholeBitForBit) {
  expect_parts_are_the_whole([](Net& net, const at::Tensor& x) { return net.second(torch::gelu(net.first(x))); });
  // Ways that part and meet again, and a parameter that stands alone.
  expect_parts_are_the_whole(
      [](Net& net, const at::Tensor& x) { return x * net.bias + net.second(torch::tanh(net.first(x))) * x.sin(); });
  // A weight that is used twice, and one that is made of others first.
  expect_parts_are_the_whole([](Net& net, const at::Tensor& x) {
    return torch::linear(torch::linear(x, net.first->weight), net.first->weight.t() * net.bias, net.bias.exp());
  });
  // The input is passed on, and comes out with a part that does not depend on it.
  expect_parts_are_the_whole([](Net& net, const at::Tensor& x) { return x + net.first(torch::ones({3, 4})); });
}

TEST(SplitBackward, HooksOnActivationsActOnce) {
  expect_parts_are_the_whole([](Net& net, const at::Tensor& x) {
    const at::Tensor hidden = net.first(x);
    hidden.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    return net.second(hidden) * net.bias;
  });
}

TEST(SplitBackward, RecomputesInBothParts) {
  expect_parts_are_the_whole([](Net& net, const at::Tensor& x) {
    return recompute([&net](const at::Tensor& y) { return net.second(torch::gelu(net.first(y))); }, x) + x;
  });
}

TEST(SplitBackward, FreesWhatTheWeightsDoNotNeed) {
  Net net;
  const at::Tensor x = torch::ones({3, 4}).requires_grad_(true);
  at::Tensor output = net.second(net.first(x)).exp();  // exp keeps its result
  const auto storage = output.storage().getWeakStorageImpl();
  SplitBackward parts(torch::autograd::impl::gradient_edge(output), torch::ones({3, 4}), x);
  output.reset();
  EXPECT_TRUE(storage.expired());
  parts.run_weights();
  EXPECT_TRUE(net.first->weight.grad().defined());
}

TEST(SplitBackward, WithoutAnInputAllIsLeftForTheSecondPart) {
  Net net;
  for (const bool has_input : {false, true}) {
    net.zero_grad();
    const at::Tensor x = torch::ones({3, 4}), unused = torch::ones({2}).requires_grad_(true);
    SplitBackward parts(torch::autograd::impl::gradient_edge(net.first(x)), torch::ones({3, 4}),
                        has_input ? unused : at::Tensor());
    EXPECT_FALSE(parts.input_gradient().defined());
    EXPECT_FALSE(net.first->weight.grad().defined());
    parts.run_weights();
    expect_equal(net.first->weight.grad(), torch::full({4, 4}, 3.0f));
  }
}

}  // namespace
}  // namespace serried::testing
