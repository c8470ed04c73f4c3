// Inputs in full precision beside parameters that compute in low: cast where they meet, differentiably.
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

const MixedPrecision kLow{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

/// A module that `run` applies to `x`: sharded and given f32, against a bf16 copy that is given bf16.
template <class Module>
void expect_cast(const char* name, const std::function<Module()>& build, at::IntArrayRef sizes,
                 const std::function<at::Tensor(Module&, const at::Tensor&)>& run) {
  Module module = seeded(3, build), plain = seeded(3, build);
  plain->to(at::kBFloat16);
  fully_shard(*module, {.mixed_precision = kLow});
  const at::Tensor value = models::values(sizes, 1).to(at::kFloat);
  const at::Tensor x = value.clone().requires_grad_(), low = value.to(at::kBFloat16).requires_grad_();
  const at::Tensor y = run(module, x), expected = run(plain, low);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16) << name;
  expect_equal(y, expected, name);
  y.to(at::kFloat).square().sum().backward();
  expected.to(at::kFloat).square().sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat) << name;
  expect_equal(x.grad(), low.grad().to(at::kFloat), name);
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    const at::Tensor gradient = module->parameters()[i].grad();
    EXPECT_EQ(gradient.scalar_type(), at::kFloat) << name;
    EXPECT_TRUE(at::allclose(DTensor(gradient).full_tensor(), plain->parameters()[i].grad().to(at::kFloat), 1e-2, 1e-2))
        << name << ", parameter " << i;
  }
}

template <class Module>
at::Tensor call(Module& module, const at::Tensor& x) {
  return module->forward(x);
}

TEST(FullyShardCastInputs, TheyAreCastForEveryLayer) {
  run_ranks(2, [](const Group&) {
    using namespace torch::nn;
    expect_cast<Linear>(
        "Linear", [] { return Linear(3, 5); }, {4, 3}, call<Linear>);
    expect_cast<Linear>(
        "Linear, three dims", [] { return Linear(3, 5); }, {2, 4, 3}, call<Linear>);
    expect_cast<Linear>(
        "no bias", [] { return Linear(LinearOptions(3, 5).bias(false)); }, {4, 3}, call<Linear>);
    expect_cast<LayerNorm>(
        "LayerNorm", [] { return LayerNorm(LayerNormOptions({6})); }, {2, 6}, call<LayerNorm>);
    expect_cast<GroupNorm>(
        "GroupNorm", [] { return GroupNorm(2, 4); }, {2, 4, 3}, call<GroupNorm>);
    expect_cast<Conv1d>(
        "Conv1d", [] { return Conv1d(2, 3, 3); }, {2, 2, 5}, call<Conv1d>);
    expect_cast<Conv2d>(
        "Conv2d", [] { return Conv2d(2, 3, 3); }, {2, 2, 5, 5}, call<Conv2d>);
    expect_cast<ConvTranspose2d>(
        "ConvTranspose2d", [] { return ConvTranspose2d(2, 3, 3); }, {2, 2, 4, 4},
        [](ConvTranspose2d& m, const at::Tensor& x) { return m->forward(x); });
    expect_cast<LSTM>(
        "LSTM", [] { return LSTM(3, 4); }, {5, 2, 3},
        [](LSTM& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
    expect_cast<GRU>(
        "GRU", [] { return GRU(3, 4); }, {5, 2, 3},
        [](GRU& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
    expect_cast<PReLU>(
        "PReLU", [] { return PReLU(); }, {4, 3}, call<PReLU>);
  });
}

TEST(FullyShardCastInputs, WholeModelsTrainOnInputsInFullPrecision) {
  for (int world : {1, 2, 3}) {
    run_ranks(world, [](const Group&) {
      const auto mlp = [] { return std::make_shared<Mlp>(); };
      const NetPtr net = make(mlp), plain = make(mlp);
      plain->to(at::kBFloat16);
      shard_all(*net, {.mixed_precision = kLow});
      for (int step = 0; step < 2; ++step) {
        // net->loss makes f32 inputs, since its parameters are f32.
        expect_equal(net->loss(step), plain->loss(step));
      }
    });
  }
}

TEST(FullyShardCastInputs, ACapturedStepCastsAsAnEagerOne) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = seeded(1, [] { return torch::nn::Linear(3, 5); });
    fully_shard(*layer, {.mixed_precision = kLow});
    const auto step = [&](const at::Tensor& x) {
      for (const at::Tensor& p : layer->parameters()) p.mutable_grad().reset();
      layer(x).square().sum().backward();
      return DTensor(layer->weight.grad()).full_tensor();
    };
    auto captured = capture(step);
    for (int i = 0; i < 4; ++i) {
      const at::Tensor x = models::values({2, 3}, i).to(at::kFloat);
      expect_equal(captured(x), step(x));
    }
  });
}

TEST(FullyShardCastInputs, WhatIsNotCastIsNamed) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = seeded(1, [] { return torch::nn::Linear(3, 5); });
    fully_shard(*layer, {.mixed_precision = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    const std::string text = error_text<c10::TypeError>([&] { layer(torch::ones({1, 3})); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[aten::addmm] argument 1 \"mat1\" is Float, and the parameter beside it computes in BFloat16\n"
              "  fix: cast the input of the module: x.to(at::kBFloat16)");
    EXPECT_EQ(layer(torch::ones({1, 3}, at::kBFloat16)).scalar_type(), at::kBFloat16);
    torch::nn::Linear other = seeded(1, [] { return torch::nn::Linear(3, 5); });
    fully_shard(*other, {.mixed_precision = {.param_dtype = at::kBFloat16}});
    EXPECT_NE(error_text<c10::TypeError>([&] {
                torch::ones({5, 3}) * other->weight;
              }).find("argument 0 \"self\" is Float"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace serried::testing
