// Rows of rules whose ops have no conformance vectors, on calls written by hand.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/registry.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using torch::jit::Stack;
using Ints = std::vector<int64_t>;

at::Tensor x(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}
at::Tensor below(int64_t high, at::IntArrayRef sizes) {
  return torch::randint(0, high, sizes, torch::kLong);
}
c10::IValue list(std::vector<at::Tensor> tensors) {
  return c10::List<at::Tensor>(tensors);
}
c10::IValue optionals(std::vector<std::optional<at::Tensor>> tensors) {
  c10::List<std::optional<at::Tensor>> result;
  for (const std::optional<at::Tensor>& tensor : tensors) result.push_back(tensor);
  return result;
}
c10::IValue mask(std::vector<bool> flags) {
  c10::List<bool> result;
  for (const bool flag : flags) result.push_back(flag);
  return result;
}
const c10::IValue none;

/// What several calls need of an earlier one.
Stack call(const char* name, Stack arguments, const char* overload = "") {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const SampleCall sample(op.schema(), std::move(arguments));
  Stack stack = sample.arguments;
  op.callBoxed(stack);
  return stack;
}

/// Verifies the rule that the tables give for the call; a call without one is a failure.
void expect_rows_right(const char* name, Stack arguments, const char* overload = "") {
  const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), overload);
  const SampleCall sample(op.schema(), std::move(arguments));
  const std::optional<spmd::Rule> rule = spmd::find_rule(sample.call());
  ASSERT_TRUE(rule) << name << " has no rule";
  const Verdict verdict = verify_rule(op, sample.arguments, *rule, {.max_pairs = 40});
  EXPECT_GT(verdict.rows, 0) << name;
  for (const std::string& wrong : verdict.wrong) ADD_FAILURE() << wrong;
}

class VerifierSamples : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(5); }
};

TEST_F(VerifierSamples, Pointwise) {
  expect_rows_right("sigmoid_backward", {x({5, 7}), x({5, 7}).sigmoid()});
  expect_rows_right("logit_backward", {x({5, 7}), x({5, 7}).sigmoid(), 0.1});
  expect_rows_right("multiply", {x({5, 7}), x({7})}, "Tensor");
  expect_rows_right("true_divide", {x({5, 7}), x({5, 1})}, "Tensor");
  expect_rows_right("positive", {x({5, 7})});
  expect_rows_right("_add_relu", {x({5, 7}), x({5, 7})}, "Tensor");
  expect_rows_right("add_", {x({5, 7}), x({7})}, "Tensor");
  expect_rows_right("clamp", {x({5, 7}), none, x({7})}, "Tensor");
}

TEST_F(VerifierSamples, Contractions) {
  expect_rows_right("linear", {x({3, 4, 5}), x({6, 5}), x({6})});
  expect_rows_right("linear", {x({4, 5}), x({6, 5})});
  expect_rows_right("matmul", {x({5}), x({5})});
  expect_rows_right("matmul", {x({3, 4, 5}), x({5, 6})});
  expect_rows_right("matmul", {x({3, 1, 4, 5}), x({2, 5, 6})});
  expect_rows_right("matmul", {x({5}), x({3, 5, 4})});
  expect_rows_right("matmul", {x({3, 4, 5}), x({5})});
  expect_rows_right("addmm", {x({6}), x({4, 5}), x({5, 6})});
  expect_rows_right("addmm", {x({4, 1}), x({4, 5}), x({5, 6}), 0.5, 2.0});
  expect_rows_right("_addmm_activation", {x({6}), x({4, 5}), x({5, 6})});
  expect_rows_right("_compute_linear_combination", {x({4, 3, 3}), x({5, 4})});
  const at::Tensor a = x({3, 4, 6}), b = x({3, 5, 6});
  expect_rows_right("_cdist_backward", {x({3, 4, 5}), a, b, 2.0, at::cdist(a, b, 2.0)});
}

TEST_F(VerifierSamples, LinearAlgebra) {
  const at::Tensor a = x({5, 3, 3});
  const at::Tensor spd = a.matmul(a.mT()) + 3 * torch::eye(3, torch::kDouble);
  expect_rows_right("cholesky", {spd});
  expect_rows_right("_cholesky_solve_helper", {x({5, 3, 2}), at::linalg_cholesky(spd), false});
  expect_rows_right("_linalg_eigvals", {spd});
  const Stack lu = call("aten::linalg_lu_factor_ex", {a});
  expect_rows_right("linalg_lu_factor_ex", {a});
  expect_rows_right("lu_unpack", {lu[0], lu[1]});
  const Stack ldl = call("aten::linalg_ldl_factor", {spd});
  expect_rows_right("linalg_ldl_solve", {ldl[0], ldl[1], x({5, 3, 2})});
}

TEST_F(VerifierSamples, Softmaxes) {
  expect_rows_right("softmax", {x({4, 5, 6}), 1, none}, "int");
  expect_rows_right("log_softmax", {x({4, 5, 6}), -1, none}, "int");
}

TEST_F(VerifierSamples, BatchNorms) {
  const at::Tensor input = x({4, 6, 5});
  const at::Tensor weight = x({6}), bias = x({6}), mean = x({6}), variance = x({6}).abs() + 1;
  expect_rows_right("native_batch_norm", {input, weight, bias, mean, variance, true, 0.1, 1e-5});
  expect_rows_right("native_batch_norm", {input, weight, bias, mean, variance, false, 0.1, 1e-5});
  expect_rows_right("_native_batch_norm_legit", {input, weight, bias, true, 0.1, 1e-5}, "no_stats");
  expect_rows_right("_native_batch_norm_legit_no_training", {input, weight, bias, mean, variance, 0.1, 1e-5});
  expect_rows_right("_native_batch_norm_legit_functional", {input, weight, bias, mean, variance, true, 0.1, 1e-5});
  for (const bool train : {true, false}) {
    const Stack saved = call("aten::native_batch_norm", {input, weight, bias, mean, variance, train, 0.1, 1e-5});
    expect_rows_right("native_batch_norm_backward", {x({4, 6, 5}), input, weight, mean, variance, saved[1], saved[2],
                                                     train, 1e-5, mask({true, true, true})});
  }
}

TEST_F(VerifierSamples, OtherNorms) {
  const at::Tensor input = x({4, 3, 6}), weight = x({6}), grad = x({4, 3, 6});
  const Stack saved = call("aten::native_layer_norm", {input, Ints{6}, weight, weight, 1e-5});
  expect_rows_right("native_layer_norm", {input, Ints{6}, weight, x({6}), 1e-5});
  expect_rows_right("native_layer_norm", {input, Ints{3, 6}, none, none, 1e-5});
  expect_rows_right("native_layer_norm_backward",
                    {grad, input, Ints{6}, saved[1], saved[2], weight, x({6}), mask({true, true, true})});
  expect_rows_right("_fused_rms_norm", {input, Ints{6}, weight, 1e-5});
  const Stack norm = call("aten::_weight_norm_interface", {x({4, 6}), x({4, 1}), 0});
  expect_rows_right("_weight_norm_interface", {x({4, 6}), x({4, 1}), 0});
  expect_rows_right("_weight_norm_interface_backward", {x({4, 6}), x({4, 6}), x({4, 1}), norm[1].toTensor(), 0});
}

TEST_F(VerifierSamples, Attention) {
  for (const bool causal : {false, true}) {
    const at::Tensor q = x({3, 4, 5, 8}), k = x({3, 4, 5, 8}), v = x({3, 4, 5, 8});
    expect_rows_right("_scaled_dot_product_flash_attention_for_cpu", {q, k, v, 0.0, causal});
    const Stack out = call("aten::_scaled_dot_product_flash_attention_for_cpu", {q, k, v, 0.0, causal});
    expect_rows_right("_scaled_dot_product_flash_attention_for_cpu_backward",
                      {x({3, 4, 5, 8}), q, k, v, out[0], out[1], 0.0, causal});
  }
  expect_rows_right("_scaled_dot_product_flash_attention_for_cpu",
                    {x({3, 4, 5, 8}), x({3, 2, 7, 8}), x({3, 2, 7, 8}), 0.0, false});
  expect_rows_right("_scaled_dot_product_flash_attention_for_cpu",
                    {x({3, 4, 5, 8}), x({3, 4, 7, 8}), x({3, 4, 7, 8}), 0.0, false, x({1, 1, 5, 7})});
}

TEST_F(VerifierSamples, Convolutions) {
  expect_rows_right("conv_tbc", {x({5, 4, 3}), x({3, 3, 6}), x({6}), 1});
  const Ints one = {1}, zero = {0};
  expect_rows_right("convolution", {x({3, 4, 7}), x({6, 4, 3}), x({6}), one, one, one, false, zero, 1});
  expect_rows_right("convolution", {x({3, 4, 7}), x({4, 6, 3}), x({6}), one, one, one, true, zero, 1});
  expect_rows_right("convolution", {x({3, 4, 7}), x({6, 2, 3}), none, one, one, one, false, zero, 2});
  for (const bool bias : {true, false}) {
    expect_rows_right("convolution_backward", {x({3, 6, 7}), x({3, 4, 7}), x({6, 4, 3}), Ints{6}, one, one, one, false,
                                               zero, 1, mask({true, true, bias})});
  }
}

TEST_F(VerifierSamples, Pooling) {
  const Ints two = {2, 2};
  expect_rows_right("max_pool2d_with_indices", {x({3, 4, 6, 6}), two, Ints{}, Ints{0, 0}, Ints{1, 1}, false});
  expect_rows_right("max_pool3d_with_indices",
                    {x({3, 4, 6, 6, 4}), Ints{2, 2, 2}, Ints{}, Ints{0, 0, 0}, Ints{1, 1, 1}, false});
  expect_rows_right("adaptive_avg_pool2d", {x({3, 4, 6, 6}), two});
  expect_rows_right("reflection_pad2d", {x({3, 4, 6, 6}), Ints{1, 2, 0, 1}});
  expect_rows_right("_upsample_bilinear2d_aa", {x({3, 4, 6, 6}), Ints{4, 5}, false});
  expect_rows_right("_upsample_bilinear2d_aa_backward", {x({3, 4, 4, 5}), Ints{4, 5}, Ints{3, 4, 6, 6}, false});
  expect_rows_right("affine_grid_generator", {x({3, 2, 3}), Ints{3, 4, 5, 6}, false});
  expect_rows_right("_grid_sampler_2d_cpu_fallback",
                    {x({3, 4, 6, 6}).to(at::kFloat), x({3, 5, 5, 2}).clamp(-1, 1).to(at::kFloat), 0, 0, false});
  expect_rows_right("glu_jvp", {x({3, 4}), x({3, 8}), x({3, 8}), 1});
}

TEST_F(VerifierSamples, FusedOptimizers) {
  const at::Tensor step = torch::ones({}, torch::kFloat);
  const auto some = [] { return list({x({5, 4})}); };
  const auto positive = [] { return list({x({5, 4}).abs()}); };
  for (const char* name : {"_fused_adam", "_fused_adamw"}) {
    for (const bool amsgrad : {false, true}) {
      expect_rows_right(name, {some(), some(), some(), positive(), amsgrad ? positive() : list({}), list({step}), 0.1,
                               0.9, 0.99, 0.01, 1e-8, amsgrad, false});
    }
  }
  expect_rows_right("_fused_sgd", {some(), some(), some(), 0.01, 0.9, 0.1, 0.0, true, false, false});
  expect_rows_right("_fused_sgd", {some(), some(), list({}), 0.01, 0.0, 0.1, 0.0, false, false, true});
  expect_rows_right("_fused_adagrad", {some(), some(), positive(), list({step}), 0.1, 0.0, 0.01, 1e-8, false});
}

TEST_F(VerifierSamples, Lookups) {
  expect_rows_right("embedding", {x({9, 4}), below(9, {3, 5})});
  expect_rows_right("embedding", {x({9, 4}), below(9, {5}), 2});
  expect_rows_right("embedding_dense_backward", {x({3, 5, 4}), below(9, {3, 5}), 9, -1, false});
  expect_rows_right("embedding_dense_backward", {x({3, 5, 4}), below(9, {3, 5}), 9, 2, true});
  expect_rows_right("_unsafe_index", {x({9, 4}), optionals({below(9, {5})})}, "Tensor");
  expect_rows_right("_unsafe_index_put", {x({9, 4}), optionals({torch::arange(5)}), x({5, 4}), false});
  expect_rows_right("_unsafe_index_put", {x({9, 4}), optionals({below(9, {5})}), x({5, 4}), true});
  expect_rows_right("_index_put_impl_", {x({9, 4}), optionals({below(9, {5})}), x({5, 4}), true, false});
}

TEST_F(VerifierSamples, Views) {
  const at::Tensor input = x({4, 6, 5});
  expect_rows_right("view", {input, Ints{24, 5}});
  expect_rows_right("view", {input, Ints{4, 2, 3, 5}});
  expect_rows_right("view", {input, Ints{4, -1}});
  expect_rows_right("_unsafe_view", {input, Ints{8, 15}});
  expect_rows_right("view", {input, Ints{2, 2, 30}});
  expect_rows_right("_reshape_alias", {input, Ints{24, 5}, Ints{5, 1}});
  expect_rows_right("view_as_real", {torch::randn({3, 4}, torch::kComplexDouble)});
}

TEST_F(VerifierSamples, Shapes) {
  const at::Tensor input = x({4, 6, 5});
  expect_rows_right("_stack", {list({x({4, 5}), x({4, 5}), x({4, 5})}), 1});
  expect_rows_right("chunk", {input, 3, 1});
  expect_rows_right("unsafe_split_with_sizes", {input, Ints{1, 2, 3}, 1});
  expect_rows_right("constant_pad_nd", {input, Ints{1, 2}, 0.0});
  expect_rows_right("constant_pad_nd", {input, Ints{1, 2, 0, 1}, 3.0});
  expect_rows_right("slice_scatter", {input, x({4, 2, 5}), 1, 1, 5, 2});
}

}  // namespace
}  // namespace serried::testing
