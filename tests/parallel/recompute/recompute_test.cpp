// recompute gives what the plain call gives, bit for bit, of any function that autograd can record.
#include "serried/parallel/recompute.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <optional>

#include "tests/parallel/recompute/trained.h"
#include "tests/support/models.h"

namespace serried::testing {
namespace {

namespace F = torch::nn::functional;

at::Tensor input(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return models::values(sizes, 5).to(dtype).requires_grad_();
}

// Compares `forward(x)` with `recompute(forward, x)`.
template <class Forward>
void expect_same_recomputed(const at::Tensor& x, const std::vector<at::Tensor>& parameters, Forward forward) {
  const Trained plain = trained(x, parameters, forward);
  int runs = 0;
  const auto counted = [&](const at::Tensor& in) {
    ++runs;
    return forward(in);
  };
  expect_same(trained(x, parameters, [&](const at::Tensor& in) { return recompute(counted, in); }), plain);
  EXPECT_EQ(runs, 2);
}

torch::nn::Sequential mlp(at::ScalarType dtype, double dropout) {
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::GELU(), torch::nn::Dropout(dropout),
                            torch::nn::Linear(7, 6), torch::nn::Tanh(), torch::nn::Dropout(dropout),
                            torch::nn::Linear(6, 3));
  models::fill_parameters(*net);
  net->to(dtype);
  return net;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads_) : heads(heads_) {
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    models::fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const auto split = [&](const at::Tensor& t) { return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2); };
    const at::Tensor mixed = at::scaled_dot_product_attention(split(parts[0]), split(parts[1]), split(parts[2]), {},
                                                              dropout, /*is_causal=*/true);
    const at::Tensor y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + F::dropout(down(torch::gelu(up(norm2(y)))), F::DropoutFuncOptions().p(dropout));
  }
  int64_t heads;
  double dropout = 0.2;
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
};
TORCH_MODULE(Block);

TEST(Recompute, MlpWithDropoutIsThePlainRunBitForBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    torch::nn::Sequential net = mlp(dtype, 0.3);
    expect_same_recomputed(input({4, 5}, dtype), net->parameters(),
                           [&](const at::Tensor& x) { return net->forward(x); });
  }
}

TEST(Recompute, GptBlocksWithAttentionAreThePlainRunBitForBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double dropout : {0.0, 0.2}) {
      Block first(8, 2), second(8, 4);
      for (Block* block : {&first, &second}) {
        (*block)->to(dtype);
        (*block)->dropout = dropout;
      }
      std::vector<at::Tensor> parameters = first->parameters();
      for (const at::Tensor& p : second->parameters()) parameters.push_back(p);
      const at::Tensor x = input({2, 5, 8}, dtype);
      const Trained plain = trained(x, parameters, [&](const at::Tensor& in) { return second(first(in)); });
      const auto each = [&](const at::Tensor& in) { return recompute(second, recompute(first, in)); };
      expect_same(trained(x, parameters, each), plain);
    }
  }
}

TEST(Recompute, ConvolutionsAndRecurrentNetsAreThePlainRunBitForBit) {
  torch::nn::Sequential conv(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 3).padding(1)), torch::nn::ReLU(),
                             torch::nn::MaxPool2d(2), torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 2, 2)));
  models::fill_parameters(*conv);
  expect_same_recomputed(input({2, 2, 6, 5}), conv->parameters(),
                         [&](const at::Tensor& x) { return conv->forward(x); });
  models::Recurrent recurrent;
  expect_same_recomputed(input({2, 5, 3}), recurrent.parameters(),
                         [&](const at::Tensor& x) { return recurrent.forward(x); });
}

// Autograd saves rrelu's noise before the op draws it.
TEST(Recompute, WhatIsWrittenAfterItWasSavedIsThereInTheSecondRun) {
  for (const bool goes_on : {false, true}) {
    expect_same_recomputed(input({4, 5}), {}, [&](const at::Tensor& x) {
      const at::Tensor y = at::rrelu(x - 0.2, 0.1, 0.5, /*training=*/true);
      return goes_on ? y.sin() : y;
    });
  }
}

TEST(Recompute, BatchNormMovesItsRunningStatisticsOnce) {
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4), torch::nn::ReLU(),
                              torch::nn::Linear(4, 3),
                              torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(3).momentum(0.3)));
    models::fill_parameters(*net);
    return net;
  };
  torch::nn::Sequential plain = make(), net = make();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = models::values({6, 5}, step).requires_grad_();
    const Trained expected = trained(x, plain->parameters(), [&](const at::Tensor& in) { return plain->forward(in); });
    expect_same(trained(x, net->parameters(),
                        [&](const at::Tensor& in) {
                          return recompute([&](const at::Tensor& t) { return net->forward(t); }, in);
                        }),
                expected);
    const auto wanted = plain->buffers(), buffers = net->buffers();
    ASSERT_EQ(buffers.size(), 6);
    for (size_t i = 0; i < wanted.size(); ++i) expect_equal(buffers[i], wanted[i], std::to_string(i));
  }
  net->eval();
  plain->eval();
  const at::Tensor x = input({6, 5});
  expect_same_recomputed(x, net->parameters(), [&](const at::Tensor& in) { return net->forward(in); });
}

TEST(Recompute, StateOfTheFunctionChangesOnce) {
  const at::Tensor calls = at::zeros({1}), seen = at::zeros({3});
  const auto fn = [&](const at::Tensor& x) {
    calls.add_(1);
    seen.copy_(x.detach().sum(0));
    return (x * seen).exp();  // reads what it has written: as the first run left it
  };
  const at::Tensor x = input({2, 3});
  const Trained plain = trained(x, {}, fn);
  calls.zero_();
  expect_same(trained(x, {}, [&](const at::Tensor& in) { return recompute(fn, in); }), plain);
  EXPECT_EQ(calls.item<float>(), 1);
}

TEST(Recompute, InputsNeedNoGradients) {
  torch::nn::Sequential net = mlp(at::kFloat, 0.5);
  expect_same_recomputed(input({4, 5}).detach(), net->parameters(),
                         [&](const at::Tensor& x) { return net->forward(x); });
  models::Lookup lookup;
  const at::Tensor tokens = models::indices(3, 3, 11, 0);
  expect_same_recomputed(tokens, lookup.parameters(), [&](const at::Tensor& x) { return lookup.forward(x); });
}

TEST(Recompute, Nests) {
  torch::nn::Sequential a = mlp(at::kDouble, 0.3);
  torch::nn::Linear b(3, 5), c(5, 5);
  b->to(at::kDouble);
  c->to(at::kDouble);
  std::vector<at::Tensor> parameters = a->parameters();
  for (const auto& p : {b->weight, b->bias, c->weight, c->bias}) parameters.push_back(p);
  const at::Tensor x = input({4, 5}, at::kDouble);
  const auto inner = [&](const at::Tensor& in) { return torch::dropout(b(a->forward(in)).tanh(), 0.4, true); };
  const Trained plain =
      trained(x, parameters, [&](const at::Tensor& in) { return c(inner(inner(c(in).sin()))).cos(); });
  int inner_runs = 0;
  const auto nested = [&](const at::Tensor& in) {
    const auto counted = [&](const at::Tensor& t) {
      ++inner_runs;
      return recompute(inner, t);
    };
    return recompute(
        [&, counted](const at::Tensor& t) {
          const at::Tensor once = recompute(counted, c(t).sin());
          return c(recompute(inner, once)).cos();
        },
        in);
  };
  expect_same(trained(x, parameters, nested), plain);
  EXPECT_EQ(inner_runs, 3);  // forward, the second run of the outer one, and its own
}

TEST(Recompute, WorksUnderAutogradGrad) {
  torch::nn::Sequential net = mlp(at::kDouble, 0.3);
  const at::Tensor x = input({4, 5}, at::kDouble);
  const auto gradients = [&](const at::Tensor& y) { return torch::autograd::grad({y.square().sum()}, {x}).at(0); };
  at::manual_seed(3);
  const at::Tensor plain = gradients(net->forward(x));
  at::manual_seed(3);
  expect_equal(gradients(recompute([&](const at::Tensor& in) { return net->forward(in); }, x)), plain);
  EXPECT_FALSE(x.grad().defined());
}

TEST(Recompute, BackwardTwiceRunsItTwice) {
  torch::nn::Sequential net = mlp(at::kFloat, 0.3);
  const auto twice = [](const at::Tensor& y) {
    y.sum().backward({}, /*retain_graph=*/true);
    y.square().sum().backward();
  };
  const at::Tensor x = input({4, 5}), other = input({4, 5});
  at::manual_seed(3);
  twice(net->forward(x));
  int runs = 0;
  at::manual_seed(3);
  twice(recompute(
      [&](const at::Tensor& in) {
        ++runs;
        return net->forward(in);
      },
      other));
  expect_equal(other.grad(), x.grad());
  EXPECT_EQ(runs, 3);
}

TEST(Recompute, GradientsOfGradientsAreThoseOfThePlainRun) {
  torch::nn::Sequential net = mlp(at::kDouble, 0.3);
  const auto penalty = [&](auto forward) {
    return trained(input({4, 5}, at::kDouble), net->parameters(), [&](const at::Tensor& in) {
      const at::Tensor y = forward(in);
      return y.sum() + torch::autograd::grad({y.square().sum()}, {in}, {}, true, /*create_graph=*/true).at(0);
    });
  };
  const auto fn = [&](const at::Tensor& in) { return net->forward(in).exp(); };
  expect_same(penalty([&](const at::Tensor& in) { return recompute(fn, in); }), penalty(fn));
}

TEST(Recompute, TheFunctionMayCallBackwardItself) {
  torch::nn::Sequential net = mlp(at::kDouble, 0.3);
  const auto fn = [&](const at::Tensor& x) {
    const at::Tensor y = net->forward(x).tanh();
    const at::Tensor leaf = x.detach().requires_grad_();
    const at::Tensor slope = torch::autograd::grad({net->forward(leaf).square().sum()}, {leaf}).at(0);
    return y.sum(1, true) * slope.exp() * x;
  };
  const at::Tensor x = input({4, 5}, at::kDouble);
  const Trained plain = trained(x, net->parameters(), fn);
  expect_same(trained(x, net->parameters(), [&](const at::Tensor& in) { return recompute(fn, in); }), plain);
}

struct Pair {
  at::Tensor left, right;
  template <class Fn>
  void visit_tensors(Fn& fn) {
    fn(left);
    fn(right);
  }
};

TEST(Recompute, TakesAndReturnsWhatFunctionsDo) {
  const at::Tensor x = input({2, 3}), y = input({2, 3}), z = input({2, 3});
  const auto fn = [](const std::vector<at::Tensor>& list, Pair pair, double factor, const std::string& word,
                     std::optional<at::Tensor> none, const at::Tensor& undefined) {
    EXPECT_EQ(word, "word");
    EXPECT_FALSE(none.has_value());
    EXPECT_FALSE(undefined.defined());
    return std::make_tuple((list[0] * list[1] * factor).exp(), std::vector<at::Tensor>{pair.left.sin()},
                           Pair{pair.left.cos(), pair.right * 2}, 7);
  };
  const auto gradients = [&](auto call) {
    const auto [product, list, pair, number] = call(std::vector<at::Tensor>{x, y}, Pair{z, at::Tensor(x)}, 0.5,
                                                    std::string("word"), std::optional<at::Tensor>(), at::Tensor());
    EXPECT_EQ(number, 7);
    const at::Tensor sum = (product * list.at(0) * pair.left + pair.right).square().sum();
    return torch::autograd::grad({sum}, {x, y, z});
  };
  const auto plain = gradients(fn);
  const auto recomputed = gradients([&](auto... arguments) { return recompute(fn, arguments...); });
  for (size_t i = 0; i < 3; ++i) expect_equal(recomputed[i], plain[i]);
}

TEST(Recompute, TakesModulesAsFunctions) {
  torch::nn::Linear net(3, 2);
  const at::Tensor x = input({2, 3});
  expect_equal(recompute(net, x), net(x));
  expect_equal(recompute([net](const at::Tensor& in) mutable { return net(in); }, x), net(x));
}

TEST(Recompute, WithoutGradientsItIsThePlainCall) {
  int runs = 0;
  const auto fn = [&](const at::Tensor& x) {
    ++runs;
    return x.exp();
  };
  {
    const torch::NoGradGuard guard;
    EXPECT_FALSE(recompute(fn, input({2})).requires_grad());
  }
  const c10::InferenceMode guard;
  EXPECT_TRUE(recompute(fn, at::ones({2})).is_inference());
  EXPECT_EQ(runs, 2);
}

TEST(Recompute, GeneratorsGoOnAsIfBackwardHadNotDrawn) {
  at::Generator own = at::detail::createCPUGenerator(11);
  const auto fn = [&](const at::Tensor& x) { return (torch::dropout(x, 0.5, true) + at::randn({3}, own)).exp(); };
  const auto draws = [&](auto call) {
    at::manual_seed(3);
    own.set_current_seed(11);
    const at::Tensor x = input({2, 3});
    at::Tensor y = call(x);
    const at::Tensor between = at::rand({4});
    y.sum().backward();
    return std::array{x.grad(), between, at::rand({4}), at::rand({4}, own)};
  };
  const auto plain = draws(fn), recomputed = draws([&](const at::Tensor&x) { return recompute(fn, x); });
  for (size_t i = 0; i < plain.size(); ++i) expect_equal(recomputed[i], plain[i], std::to_string(i));
}

TEST(Recompute, ThePartsOfABackwardThatAreNotNeededStayAway) {
  const at::Tensor x = input({2, 3}), y = input({2, 3});
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.exp() * b.sin() + b.tanh(); };
  const at::Tensor plain = torch::autograd::grad({fn(x, y).sum()}, {x}).at(0);
  const at::Tensor result = recompute(fn, x, y);
  expect_equal(torch::autograd::grad({result.sum()}, {x}, {}, /*retain_graph=*/true).at(0), plain);
  const at::Tensor both = torch::autograd::grad({fn(x, y).sum()}, {y}).at(0);
  expect_equal(torch::autograd::grad({result.sum()}, {y}).at(0), both);
}

}  // namespace
}  // namespace serried::testing
