// Ops of every family on parts, against the op on whole tensors: all placements, uneven sizes, and never by
// replicating.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <source_location>

#include "serried/tensor/dispatch/dispatch.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using ListOp = std::function<Tensors(const Tensors&)>;
using at::indexing::Slice;

at::Tensor scattered(at::IntArrayRef sizes, double shift = 0) {
  const at::Tensor place = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return (place * 37 % 23).view(sizes) / 7 - 1.5 + shift;
}

at::Tensor indices(at::IntArrayRef sizes, int64_t below) {
  return (at::arange(c10::multiply_integers(sizes)) * 7 % below).view(sizes);
}

// Each combination of placements of the inputs; sums only of what can be summed.
std::vector<std::vector<Placements>> combinations(const Tensors& inputs, size_t mesh_ndim) {
  std::vector<std::vector<Placements>> all = {{}};
  for (const at::Tensor& input : inputs) {
    std::vector<std::vector<Placements>> longer;
    for (const auto& begun : all) {
      for (const Placements& next : all_placements(input.dim(), mesh_ndim, input.is_floating_point())) {
        longer.push_back(begun);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  return all;
}

void expect_as_whole(const Tensors& inputs, const ListOp& op,
                     const std::source_location& at = std::source_location::current()) {
  const Tensors expected = op(inputs);
  const std::string where = "line " + std::to_string(at.line());
  for (const Sizes& shape : {Sizes{2}, Sizes{3}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const auto all = combinations(inputs, shape.size());
      const size_t stride = std::max<size_t>(1, all.size() / 40);  // enough of those that are many
      reset_dispatch_stats();
      for (size_t k = 0; k < all.size(); k += stride) {
        Tensors placed;
        std::string text = where;
        for (size_t i = 0; i < inputs.size(); ++i) {
          placed.push_back(place(inputs[i], mesh, all[k][i]));
          text += ", " + to_string(all[k][i]);
        }
        const Tensors results = op(placed);
        for (size_t r = 0; r < expected.size(); ++r) expect_close(full(results.at(r)), expected[r], text);
      }
      EXPECT_EQ(dispatch_stats().defaults, 0) << where;
    });
  }
}

// Gradients of a weighed sum of all results, with respect to all inputs that can have one.
Tensors gradients(const Tensors& inputs, const ListOp& op) {
  Tensors leaves;
  Tensors wanted;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach());
    if (input.is_floating_point()) wanted.push_back(leaves.back().requires_grad_());
  }
  at::Tensor loss;
  for (const at::Tensor& result : op(leaves)) {
    const at::Tensor part = (result * result.detach().sin()).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return torch::autograd::grad({loss}, wanted);
}

void expect_gradients(const Tensors& inputs, const ListOp& op,
                      const std::source_location& at = std::source_location::current()) {
  expect_as_whole(
      inputs, [&](const Tensors& x) { return gradients(x, op); }, at);
}

// The placement that a result has on a mesh of two ranks.
std::string result_of(const Tensors& inputs, const std::vector<const char*>& placements, const ListOp& op) {
  std::string text;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    Tensors placed;
    for (size_t i = 0; i < inputs.size(); ++i)
      placed.push_back(place(inputs[i], mesh, parse_placements(placements[i])));
    std::string found;
    for (const at::Tensor& result : op(placed))
      found += (found.empty() ? "" : ", ") + to_string(DTensor(result).placements());
    if (mesh.get_rank() == 0) text = found;
  });
  return text;
}

const at::Tensor& a53() {
  static const at::Tensor x = scattered({5, 3});
  return x;
}

TEST(Families, PointwiseOps) {
  expect_as_whole({a53(), scattered({3}, 1)}, [](const Tensors& x) { return Tensors{x[0] + x[1]}; });
  expect_as_whole({a53(), scattered({5, 1}, 1)}, [](const Tensors& x) { return Tensors{x[0] * x[1]}; });
  expect_as_whole({a53(), scattered({3}, 9)}, [](const Tensors& x) { return Tensors{x[0] / x[1]}; });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{at::gelu(x[0]), at::exp(x[0]), at::clamp(x[0], -1, 1), -x[0], x[0] - 1};
  });
  expect_as_whole({a53(), scattered({5, 3}, 2)}, [](const Tensors& x) {
    return Tensors{at::maximum(x[0], x[1]), at::where(x[0] > 0, x[0], x[1])};
  });
  expect_as_whole({a53(), scattered({3}), scattered({5, 1})},
                  [](const Tensors& x) { return Tensors{at::addcmul(x[0], x[1], x[2])}; });
  expect_as_whole({a53(), scattered({5, 3}, 4)}, [](const Tensors& x) {
    return Tensors{at::special_xlog1py(x[0], x[1]), at::lerp(x[0], x[1], 0.3)};
  });
}

TEST(Families, SumsTravelThroughWhatIsLinear) {
  const at::Tensor a = scattered({4, 4});
  const auto of = [&](const std::vector<const char*>& placements, auto&& op) {
    return result_of(Tensors(placements.size(), a), placements, [&](const Tensors& x) { return Tensors{op(x)}; });
  };
  EXPECT_EQ(of({"P", "P"}, [](const Tensors& x) { return x[0] + x[1]; }), "P");
  EXPECT_EQ(of({"P(avg)", "P(avg)"}, [](const Tensors& x) { return x[0] - x[1]; }), "P(avg)");
  EXPECT_EQ(of({"P", "R"}, [](const Tensors& x) { return x[0] + x[1]; }), "R")
      << "it would be reduced anew by all who read it";
  EXPECT_EQ(of({"P", "R"}, [](const Tensors& x) { return x[0] * x[1]; }), "P");
  EXPECT_EQ(of({"R", "P"}, [](const Tensors& x) { return x[0] * x[1]; }), "P");
  EXPECT_EQ(of({"P", "R"}, [](const Tensors& x) { return x[0] / x[1]; }), "P");
  EXPECT_EQ(of({"R", "P"}, [](const Tensors& x) { return x[0] / x[1]; }), "R");
  EXPECT_EQ(of({"P"}, [](const Tensors& x) { return -x[0] * 2; }), "P");
  EXPECT_EQ(of({"P"}, [](const Tensors& x) { return x[0].to(at::kFloat); }), "P");
  EXPECT_EQ(of({"P"}, [](const Tensors& x) { return x[0].to(at::kLong); }), "R");
  EXPECT_EQ(of({"P(max)"}, [](const Tensors& x) { return x[0].clone().t().contiguous(); }), "P(max)");
  EXPECT_EQ(of({"P(max)"}, [](const Tensors& x) { return at::relu(x[0]); }), "R");
  EXPECT_EQ(of({"P(max)"}, [](const Tensors& x) { return at::positive(x[0]); }), "P(max)");
}

TEST(Families, NewTensorsLikeOthers) {
  const Tensors one = {a53()};
  const auto of = [&](const char* placement, auto&& op) {
    return result_of(one, {placement}, [&](const Tensors& x) { return Tensors{op(x[0])}; });
  };
  EXPECT_EQ(of("S1", [](const at::Tensor& x) { return at::zeros_like(x); }), "S1");
  EXPECT_EQ(of("P", [](const at::Tensor& x) { return at::ones_like(x); }), "R");
  EXPECT_EQ(of("S0", [](const at::Tensor& x) { return x.new_full({5, 3}, 2); }), "S0");
  EXPECT_EQ(of("S0", [](const at::Tensor& x) { return x.new_zeros({7}); }), "R");
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{at::ones_like(x[0]), at::full_like(x[0], 3), x[0].new_full({2, 2}, 4)};
  });
}

TEST(Families, MatrixProducts) {
  expect_as_whole({a53(), scattered({3, 7})}, [](const Tensors& x) { return Tensors{x[0].mm(x[1])}; });
  expect_as_whole({scattered({7}), a53(), scattered({3, 7})},
                  [](const Tensors& x) { return Tensors{at::addmm(x[0], x[1], x[2])}; });
  expect_as_whole({scattered({2, 5, 3}), scattered({2, 3, 4})},
                  [](const Tensors& x) { return Tensors{x[0].bmm(x[1])}; });
  expect_as_whole({a53(), scattered({3})}, [](const Tensors& x) {
    return Tensors{x[0].mv(x[1]), at::outer(x[1], x[1]), x[1].dot(x[1])};
  });
  expect_as_whole({scattered({2, 5, 3}), scattered({4, 3}), scattered({4})},
                  [](const Tensors& x) { return Tensors{at::linear(x[0], x[1], x[2])}; });
  expect_as_whole({scattered({2, 5, 3}), scattered({3, 4})}, [](const Tensors& x) {
    return Tensors{at::matmul(x[0], x[1]), at::einsum("abc,cd->dab", {x[0], x[1]})};
  });
}

TEST(Families, ProductsOverACutDimAreSums) {
  const Tensors square = {scattered({4, 4}), scattered({4, 4})};
  const ListOp mm = [](const Tensors& x) { return Tensors{x[0].mm(x[1])}; };
  EXPECT_EQ(result_of(square, {"S0", "R"}, mm), "S0");
  EXPECT_EQ(result_of(square, {"R", "S1"}, mm), "S1");
  EXPECT_EQ(result_of(square, {"S1", "S0"}, mm), "P");
  EXPECT_EQ(result_of(square, {"P", "R"}, mm), "P");
  EXPECT_EQ(result_of({scattered({4})}, {"S0"}, [](const Tensors& x) { return Tensors{x[0].dot(x[0])}; }), "P");
}

TEST(Families, Reductions) {
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].sum(), x[0].sum(0), x[0].mean({1}, true), x[0].mean(), x[0].prod(0)};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].amax(0), x[0].amin(1), x[0].max(), (x[0] > 0).all(), (x[0] > 2).any(0)};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].argmax(0), x[0].argmin(), std::get<0>(x[0].max(0)), std::get<1>(x[0].min(1))};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].median(), std::get<0>(x[0].kthvalue(2, 0)), std::get<0>(x[0].mode(1))};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].cumsum(0), x[0].cumprod(1), x[0].logcumsumexp(0), std::get<0>(x[0].cummax(0))};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].var(0), x[0].std(), x[0].logsumexp(1), x[0].norm(), x[0].norm(1, {0}), x[0].nansum(0)};
  });
}

TEST(Families, ReductionsOverACutDimArePending) {
  const auto of = [&](auto&& op) {
    return result_of({a53()}, {"S0"}, [&](const Tensors& x) { return Tensors{op(x[0])}; });
  };
  EXPECT_EQ(of([](const at::Tensor& x) { return x.sum(0); }), "P");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.sum(1); }), "S0");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.mean(0); }), "P");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.amax(0); }), "P(max)");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.amin(0, true); }), "P(min)");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.prod(0); }), "P(product)");
  EXPECT_EQ(of([](const at::Tensor& x) { return x.argmax(0); }), "R");
}

TEST(Families, SoftmaxesAndNorms) {
  expect_as_whole({a53()}, [](const Tensors& x) { return Tensors{at::softmax(x[0], 0), at::log_softmax(x[0], 1)}; });
  expect_as_whole({scattered({2, 5, 4}), scattered({4}), scattered({4})},
                  [](const Tensors& x) { return Tensors{at::layer_norm(x[0], {4}, x[1], x[2])}; });
  expect_as_whole({scattered({2, 5, 4}), scattered({4})},
                  [](const Tensors& x) { return Tensors{at::rms_norm(x[0], {4}, x[1])}; });
  expect_as_whole({scattered({3, 4, 2}), scattered({4}), scattered({4})},
                  [](const Tensors& x) { return Tensors{at::group_norm(x[0], 2, x[1], x[2])}; });
  expect_as_whole({scattered({3, 4, 2}), scattered({4}), scattered({4})}, [](const Tensors& x) {
    return Tensors{at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false)};
  });
}

TEST(Families, PoolsResizesAndConvolutions) {
  const Tensors image = {scattered({2, 3, 6, 5})};
  expect_as_whole(image, [](const Tensors& x) {
    return Tensors{at::avg_pool2d(x[0], {2, 2}), at::max_pool2d(x[0], {2, 2}), at::adaptive_avg_pool2d(x[0], {2, 2})};
  });
  expect_as_whole(image, [](const Tensors& x) {
    return Tensors{at::upsample_nearest2d(x[0], {7, 8}), at::upsample_bilinear2d(x[0], {7, 8}, false)};
  });
  expect_as_whole({scattered({2, 3, 6}), scattered({4, 3, 3}), scattered({4})},
                  [](const Tensors& x) { return Tensors{at::conv1d(x[0], x[1], x[2], 1, 1)}; });
  expect_as_whole({scattered({2, 3, 6, 5}), scattered({2, 4, 4, 2}) / 4},
                  [](const Tensors& x) { return Tensors{at::grid_sampler(x[0], x[1], 0, 0, false)}; });
}

TEST(Families, SortsAndHistograms) {
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{std::get<0>(x[0].sort(0)), std::get<1>(x[0].sort(1)), std::get<0>(x[0].topk(2, 0))};
  });
  expect_as_whole({a53()}, [](const Tensors& x) { return Tensors{at::histc(x[0], 4, -1, 1)}; });
  expect_as_whole({a53(), std::get<0>(scattered({4}, 0.04).sort())}, [](const Tensors& x) {
    return Tensors{at::bucketize(x[0], x[1]), at::searchsorted(x[1], x[0])};
  });
}

TEST(Families, LinearAlgebra) {
  const at::Tensor spd = at::eye(3, at::kDouble) * 4 + scattered({2, 3, 3}).bmm(scattered({2, 3, 3}).transpose(1, 2));
  expect_as_whole({spd}, [](const Tensors& x) {
    return Tensors{std::get<0>(at::linalg_cholesky_ex(x[0])), std::get<0>(at::linalg_inv_ex(x[0])),
                   at::linalg_det(x[0]), at::linalg_eigvalsh(x[0])};
  });
  expect_as_whole({spd, scattered({2, 3, 4})},
                  [](const Tensors& x) { return Tensors{std::get<0>(at::linalg_solve_ex(x[0], x[1]))}; });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{std::get<1>(at::linalg_svd(x[0])), x[0].tril(), x[0].triu(1), at::diag(x[0])};
  });
  expect_as_whole({a53(), scattered({5, 3}, 1)},
                  [](const Tensors& x) { return Tensors{at::linalg_cross(x[0], x[1], 1)}; });
}

TEST(Families, Views) {
  const Tensors block = {scattered({4, 3, 6})};
  expect_as_whole(block, [](const Tensors& x) {
    return Tensors{x[0].view({12, 6}), x[0].view({4, 18}), x[0].view({2, 2, 3, 6}), x[0].reshape({-1})};
  });
  expect_as_whole(block, [](const Tensors& x) {
    return Tensors{x[0].permute({2, 0, 1}), x[0].transpose(0, 1), x[0].flatten(1), x[0].movedim(0, 2)};
  });
  expect_as_whole({scattered({4, 1, 6})}, [](const Tensors& x) {
    return Tensors{x[0].squeeze(), x[0].squeeze(1), x[0].unsqueeze(0), x[0].expand({4, 5, 6})};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].t(), x[0].repeat({2, 1}), x[0].tile({1, 2}),
                   at::view_as_complex(x[0].view({5, 3, 1}).expand({5, 3, 2}).contiguous())};
  });
}

TEST(Families, SlicesAndPieces) {
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].slice(0, 1, 4), x[0].slice(1, 0, 3), x[0].select(0, 2), x[0].select(1, 0)};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].unbind(0)[1], x[0].split(2, 0)[2], x[0].chunk(2, 1)[0], x[0].narrow(0, 1, 2)};
  });
  expect_as_whole({a53(), scattered({2, 3})}, [](const Tensors& x) {
    return Tensors{at::cat({x[0], x[1]}), at::cat({x[1], x[0], x[1]})};
  });
  expect_as_whole({a53(), scattered({5, 3}, 2)}, [](const Tensors& x) {
    return Tensors{at::stack({x[0], x[1]}), at::stack({x[0], x[1]}, 2), at::cat({x[0], x[1]}, 1)};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].roll(1, 0), x[0].flip({1}), at::constant_pad_nd(x[0], {1, 2}, 0),
                   at::constant_pad_nd(x[0], {1, 2}, 3)};
  });
  expect_as_whole({a53(), scattered({3})}, [](const Tensors& x) {
    return Tensors{at::select_scatter(x[0], x[1], 0, 2), at::slice_scatter(x[0], x[0].slice(0, 0, 2), 0, 3, 5)};
  });
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{at::abs(at::fft_fft(x[0], std::nullopt, 0)), at::abs(at::fft_rfft(x[0], std::nullopt, 1))};
  });
}

TEST(Families, Lookups) {
  expect_as_whole({scattered({7, 4}), indices({2, 5}, 7)},
                  [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1])}; });
  expect_as_whole({a53(), indices({4}, 5)}, [](const Tensors& x) {
    return Tensors{x[0].index_select(0, x[1]), x[0].index({x[1]})};
  });
  expect_as_whole({a53(), indices({5, 2}, 3)}, [](const Tensors& x) { return Tensors{x[0].gather(1, x[1])}; });
  expect_as_whole({a53(), indices({2, 3}, 5), scattered({2, 3})},
                  [](const Tensors& x) { return Tensors{x[0].scatter_add(0, x[1], x[2])}; });
  expect_as_whole({a53(), indices({1, 3}, 5), scattered({1, 3})},
                  [](const Tensors& x) { return Tensors{x[0].scatter(0, x[1], x[2])}; });
  expect_as_whole({a53(), indices({2}, 5), scattered({2, 3})}, [](const Tensors& x) {
    return Tensors{x[0].index_add(0, x[1], x[2]), x[0].index_put({x[1]}, x[2]), x[0].index_fill(0, x[1], 2),
                   x[0].index_copy(0, x[1], x[2])};
  });
}

TEST(Families, ResultsWhoseSizeDependsOnData) {
  expect_as_whole({a53()}, [](const Tensors& x) {
    return Tensors{x[0].nonzero(), x[0].masked_select(x[0] > 0), std::get<0>(at::_unique(x[0] > 0)),
                   x[0].index({x[0] > 0})};
  });
}

TEST(Families, Attention) {
  const at::Tensor query = scattered({2, 2, 5, 4}), key = scattered({2, 2, 3, 4}, 1);
  expect_as_whole({query, key, key},
                  [](const Tensors& x) { return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2])}; });
  expect_as_whole({query, query, query}, [](const Tensors& x) {
    return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, true)};
  });
}

TEST(Families, ListsOfTensors) {
  expect_as_whole({a53(), scattered({4})}, [](const Tensors& x) {
    return Tensors{at::_foreach_mul(at::TensorList({x[0], x[1]}), 3)[1],
                   at::_foreach_add(at::TensorList({x[0], x[1]}), at::TensorList({x[0], x[1]}))[0],
                   at::_foreach_norm({x[0], x[1]})[0], at::_foreach_max({x[0], x[1]})[1]};
  });
}

TEST(FamilyGradients, PointwiseOps) {
  expect_gradients({a53(), scattered({3}, 9)}, [](const Tensors& x) {
    return Tensors{x[0] + x[1], x[0] * x[1], x[0] / x[1], at::maximum(x[0], x[1]), at::where(x[0] > 0, x[0], x[1])};
  });
  expect_gradients({a53()}, [](const Tensors& x) {
    return Tensors{at::gelu(x[0]), at::exp(x[0]), at::clamp(x[0], -1, 1), x[0].square(), x[0].sigmoid()};
  });
}

TEST(FamilyGradients, MatrixProducts) {
  expect_gradients({scattered({7}), a53(), scattered({3, 7})}, [](const Tensors& x) {
    return Tensors{at::addmm(x[0], x[1], x[2]), x[1].mm(x[2])};
  });
  expect_gradients({scattered({2, 5, 3}), scattered({4, 3}), scattered({4})}, [](const Tensors& x) {
    return Tensors{at::linear(x[0], x[1], x[2]), at::einsum("abc,dc->dab", {x[0], x[1]})};
  });
}

TEST(FamilyGradients, Reductions) {
  expect_gradients({a53()}, [](const Tensors& x) {
    return Tensors{x[0].sum(0), x[0].mean(), x[0].mean({1}, true), x[0].amax(0), x[0].prod(1), x[0].var(0)};
  });
  expect_gradients({a53()}, [](const Tensors& x) {
    return Tensors{x[0].norm(), x[0].logsumexp(0), x[0].cumsum(0), std::get<0>(x[0].max(0)), x[0].std()};
  });
}

TEST(FamilyGradients, WhatAutogradWritesIntoZerosOfItsOwn) {
  expect_gradients({a53()}, [](const Tensors& x) {
    return Tensors{std::get<0>(x[0].max(0)), std::get<0>(x[0].median(1)), std::get<0>(x[0].kthvalue(2, 0)),
                   std::get<0>(x[0].sort(0))};
  });
  expect_gradients({a53()}, [](const Tensors& x) {
    return Tensors{std::get<0>(x[0].topk(2, 0)), std::get<0>(x[0].cummax(0)), x[0].trace(), x[0].median()};
  });
}

TEST(FamilyGradients, SoftmaxesAndNorms) {
  expect_gradients({a53()}, [](const Tensors& x) { return Tensors{at::softmax(x[0], 0), at::log_softmax(x[0], 1)}; });
  expect_gradients({scattered({2, 5, 4}), scattered({4}), scattered({4})}, [](const Tensors& x) {
    return Tensors{at::layer_norm(x[0], {4}, x[1], x[2]), at::rms_norm(x[0], {4}, x[1])};
  });
  expect_gradients({scattered({3, 4, 2}), scattered({4}), scattered({4})},
                   [](const Tensors& x) { return Tensors{at::group_norm(x[0], 2, x[1], x[2])}; });
}

TEST(FamilyGradients, ViewsAndPieces) {
  expect_gradients({scattered({4, 3, 6})}, [](const Tensors& x) {
    return Tensors{x[0].view({12, 6}), x[0].permute({2, 0, 1}), x[0].flatten(1),
                   x[0].unsqueeze(1).expand({4, 2, 3, 6})};
  });
  expect_gradients({a53(), scattered({2, 3})}, [](const Tensors& x) {
    return Tensors{at::cat({x[0], x[1]}), x[0].slice(0, 1, 4), x[0].select(1, 0), x[0].roll(1, 0), x[0].tril()};
  });
  expect_gradients({a53(), scattered({5, 3}, 2)}, [](const Tensors& x) {
    return Tensors{at::stack({x[0], x[1]}, 1), x[0].split(2)[1], x[1].unbind(0)[3]};
  });
}

TEST(FamilyGradients, Lookups) {
  expect_gradients({scattered({7, 4}), indices({2, 5}, 7)},
                   [](const Tensors& x) { return Tensors{at::embedding(x[0], x[1])}; });
  expect_gradients({a53(), indices({4}, 5)}, [](const Tensors& x) {
    return Tensors{x[0].index_select(0, x[1]), x[0].index({x[1]})};
  });
  expect_gradients({a53(), indices({5, 2}, 3)}, [](const Tensors& x) { return Tensors{x[0].gather(1, x[1])}; });
}

TEST(FamilyGradients, ImagesAndAttention) {
  expect_gradients({scattered({2, 3, 6}), scattered({4, 3, 3}), scattered({4})},
                   [](const Tensors& x) { return Tensors{at::conv1d(x[0], x[1], x[2], 1, 1)}; });
  expect_gradients({scattered({2, 3, 6, 5})}, [](const Tensors& x) {
    return Tensors{at::avg_pool2d(x[0], {2, 2}), at::max_pool2d(x[0], {2, 2}), at::upsample_nearest2d(x[0], {7, 8})};
  });
  expect_gradients({scattered({2, 2, 5, 4}), scattered({2, 2, 3, 4}, 1), scattered({2, 2, 3, 4})},
                   [](const Tensors& x) { return Tensors{at::scaled_dot_product_attention(x[0], x[1], x[2])}; });
}

TEST(Families, CopiesKeepTheirPlacement) {
  const ListOp copies = [](const Tensors& x) {
    return Tensors{x[0].clone(), x[0].detach(), x[0].contiguous(), x[0].alias(), x[0].view(x[0].sizes())};
  };
  EXPECT_EQ(result_of({a53()}, {"S1"}, copies), "S1, S1, S1, S1, S1");
  EXPECT_EQ(result_of({a53()}, {"P(min)"}, copies), "P(min), P(min), P(min), P(min), P(min)");
}

}  // namespace
}  // namespace serried::testing
