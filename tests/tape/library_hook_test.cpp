// The library's own hooks run like those of users, and can be told from them.
#include "serried/tape/library_hook.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include "tests/support/close.h"

namespace serried {
namespace {

// Per hook on `t`, in the order of registration, whether it is the library's.
std::vector<bool> hooks_of(const at::Tensor& t) {
  std::vector<bool> is_ours;
  const auto& list = torch::autograd::impl::get_autograd_meta(t)->cpp_hooks_list_;
  for (const TensorHook& hook : *list) is_ours.push_back(is_library_hook(hook));
  return is_ours;
}

TEST(LibraryHook, IsToldFromAHookOfAUserOnTheSameTensor) {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  const at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) {});
  on_gradient_of({y}, [] {});
  y.register_hook([](const at::Tensor& grad) { return grad * 2; });
  EXPECT_EQ(hooks_of(y), (std::vector<bool>{false, true, false}));
}

TEST(LibraryHook, RunsForEachOutputThatRequiresAGradient) {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  const at::Tensor y = x * 2;
  int calls = 0;
  EXPECT_TRUE(on_gradient_of({y, x, at::ones({2}), at::Tensor()}, [&] { ++calls; }));
  y.sum().backward();
  EXPECT_EQ(calls, 2);
  testing::expect_equal(x.grad(), at::full({2}, 2.f), "the gradient stays");
  EXPECT_FALSE(on_gradient_of({at::ones({2})}, [] {}));
}

TEST(LibraryHook, MayChangeAGradient) {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  change_gradient_of(x, [](const at::Tensor& grad) { return grad * 3; });
  x.sum().backward();
  testing::expect_equal(x.grad(), at::full({2}, 3.f));
}

TEST(LibraryHook, AfterANodeIsToldFromAnother) {
  using torch::autograd::variable_list;
  const torch::autograd::utils::LambdaPostHook other(
      [](const variable_list& outputs, const variable_list&) { return outputs; });
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  const at::Tensor y = x * 2;
  int calls = 0;
  auto hook = library_post_hook([&] { ++calls; });
  EXPECT_TRUE(is_library_hook(*hook));
  EXPECT_FALSE(is_library_hook(other));
  y.grad_fn()->add_post_hook(std::move(hook));
  y.sum().backward();
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace serried
