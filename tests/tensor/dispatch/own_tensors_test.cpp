// Composites that make plain tensors of their own: matrix_rank in all its forms, quantiles, formulas of gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/factories.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::place;
using testing::usual_meshes;

using Ranks = std::function<at::Tensor(const at::Tensor&)>;

// A batch of five with ranks 3, 2, 1, 0, 3, symmetric.
at::Tensor matrices() {
  at::Tensor made = at::zeros({5, 3, 3}, at::kDouble);
  const at::Tensor ranks = at::tensor({3, 2, 1, 0, 3}, at::kLong);
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t k = 0; k < ranks[i].item<int64_t>(); ++k) {
      const at::Tensor v = at::tensor({1.0, 0.25 * double(k), 0.0}, at::kDouble).roll(k) * double(i + 1);
      made[i] += at::outer(v, v);
    }
  }
  return made;
}

std::vector<std::pair<std::string, Ranks>> forms() {
  return {
      {"default", [](const at::Tensor& x) { return at::linalg_matrix_rank(x); }},
      {"hermitian",
       [](const at::Tensor& x) { return at::linalg_matrix_rank(x, std::optional<double>(), std::nullopt, true); }},
      {"atol", [](const at::Tensor& x) { return at::linalg_matrix_rank(x, std::optional<double>(1.5), std::nullopt); }},
      {"atol, rtol",
       [](const at::Tensor& x) {
         return at::linalg_matrix_rank(x, std::optional<double>(0.5), std::optional<double>(0.9));
       }},
      {"tensors",
       [](const at::Tensor& x) {
         return at::linalg_matrix_rank(x, x.amax({-2, -1}) / 2, x.amax({-2, -1}));
       }},
      {"tol", [](const at::Tensor& x) { return at::linalg_matrix_rank(x, 1.5); }},
      {"tol tensor",
       [](const at::Tensor& x) {
         return at::linalg_matrix_rank(x, x.amax({-2, -1}) / 2);
       }},
  };
}

TEST(MatrixRank, CountsAsOnOneDeviceUnderEveryPlacement) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const auto& [name, ranks] : forms()) {
        for (const at::Tensor& x : {matrices(), matrices()[1], matrices().narrow(0, 0, 0)}) {
          const at::Tensor expected = ranks(x);
          for (const Placements& placements : all_placements(x.dim(), shape.size(), true)) {
            const at::Tensor result = ranks(place(x, mesh, placements));
            ASSERT_TRUE(is_dtensor(result)) << name;
            expect_equal(testing::full(result), expected, name + " of " + to_string(placements));
          }
        }
      }
    });
  }
}

TEST(MatrixRank, HasNoGradientAndWorksInEveryMode) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor expected = at::linalg_matrix_rank(matrices());
    const at::Tensor x = distribute_tensor(matrices().requires_grad_(), mesh, {Shard(0)});
    EXPECT_FALSE(at::linalg_matrix_rank(x).requires_grad());
    expect_equal(testing::full(at::linalg_matrix_rank(x)), expected);
    const c10::InferenceMode inference;
    for (const auto& [name, ranks] : forms()) {
      const DTensor y = distribute_tensor(matrices(), mesh, {Shard(0)});
      expect_equal(testing::full(ranks(y)), ranks(matrices()), name);
    }
  });
}

TEST(MatrixRank, WritesIntoAGivenDTensorAndIntoNoPlainOne) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(matrices(), mesh, {Shard(0)});
    at::Tensor out = zeros({5}, mesh, {Shard(0)}, at::kLong);
    at::linalg_matrix_rank_out(out, x, 1.5);
    expect_equal(testing::full(out), at::linalg_matrix_rank(matrices(), 1.5));
    at::Tensor plain = at::zeros({5}, at::kLong);
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::linalg_matrix_rank_out(plain, x, 1.5); }),
                HasSubstr("the out= tensor \"out\" is plain"));
  });
}

TEST(MatrixRank, OfAVectorIsRefusedAsOnOneDevice) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = testing::iota({4});
    const auto text = [](const at::Tensor& t) { return error_text<c10::Error>([&] { at::linalg_matrix_rank(t); }); };
    EXPECT_EQ(text(distribute_tensor(x, mesh, {Shard(0)})), text(x));
  });
}

// Formulas of gradients make tensors of their own too, to scatter or index into.
TEST(OwnTensors, GradientsOfWhatFillsOne) {
  using Op = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Op>> ops = {
      {"max", [](const at::Tensor& x) { return std::get<0>(x.max(1)); }},
      {"min all", [](const at::Tensor& x) { return x.min(); }},
      {"median", [](const at::Tensor& x) { return std::get<0>(x.median(0)); }},
      {"mode", [](const at::Tensor& x) { return std::get<0>(x.mode(1)); }},
      {"kthvalue", [](const at::Tensor& x) { return std::get<0>(x.kthvalue(2, 0)); }},
      {"sort", [](const at::Tensor& x) { return std::get<0>(x.sort(1)).cumsum(1); }},
      {"topk", [](const at::Tensor& x) { return std::get<0>(x.topk(2, 0)); }},
      {"cummax", [](const at::Tensor& x) { return std::get<0>(x.cummax(0)); }},
      {"trace", [](const at::Tensor& x) { return x.narrow(0, 0, 3).trace(); }},
      {"prod", [](const at::Tensor& x) { return x.prod(1); }},
      {"prod all", [](const at::Tensor& x) { return x.prod(); }},
      {"cumprod", [](const at::Tensor& x) { return x.cumprod(1); }},
      {"diagonal", [](const at::Tensor& x) { return x.diagonal(); }},
      {"diag", [](const at::Tensor& x) { return x.diag(); }},
      {"tril", [](const at::Tensor& x) { return x.tril(); }},
      {"unfold", [](const at::Tensor& x) { return x.unfold(0, 3, 2); }},
      {"repeat",
       [](const at::Tensor& x) {
         return x.repeat({2, 2});
       }},
      {"roll", [](const at::Tensor& x) { return x.roll({1}, {0}); }},
      {"renorm", [](const at::Tensor& x) { return x.renorm(2, 0, 1.5); }},
      {"logcumsumexp", [](const at::Tensor& x) { return x.logcumsumexp(0); }},
      {"quantile", [](const at::Tensor& x) { return x.quantile(0.3, 1); }},
      {"quantile all", [](const at::Tensor& x) { return x.quantile(0.3); }},
      {"quantile midpoint", [](const at::Tensor& x) { return x.quantile(0.7, 0, true, "midpoint"); }},
      {"quantile nearest", [](const at::Tensor& x) { return x.quantile(0.7, 0, false, "nearest"); }},
      {"nanquantile", [](const at::Tensor& x) { return x.nanquantile(0.3, 1); }},
      {"amax", [](const at::Tensor& x) { return x.amax(0); }},
      {"norm inf", [](const at::Tensor& x) { return at::linalg_vector_norm(x, INFINITY, at::IntArrayRef{0}); }},
      {"constant_pad",
       [](const at::Tensor& x) {
         return at::constant_pad_nd(x, {1, 2});
       }},
      {"circular pad",
       [](const at::Tensor& x) {
         return at::pad(x.unsqueeze(0), {1, 2}, "circular");
       }},
      {"gradient", [](const at::Tensor& x) { return at::gradient(x, std::nullopt, 0)[0]; }},
      {"block_diag",
       [](const at::Tensor& x) {
         return at::block_diag({x, x});
       }},
      {"pdist", [](const at::Tensor& x) { return at::pdist(x); }},
      {"cosine_similarity", [](const at::Tensor& x) { return at::cosine_similarity(x, x + 1); }},
      {"fft", [](const at::Tensor& x) { return at::real(at::fft_rfft(x)); }},
      {"float_power", [](const at::Tensor& x) { return at::float_power(x.abs() + 1, 1.5); }},
      {"diff", [](const at::Tensor& x) { return x.diff(1, 0); }},
      {"rot90", [](const at::Tensor& x) { return x.rot90(); }},
      {"glu", [](const at::Tensor& x) { return at::glu(x.narrow(0, 0, 4), 0); }},
      {"select_scatter", [](const at::Tensor& x) { return at::select_scatter(x, x.select(0, 1) * 2, 0, 0); }},
  };
  const at::Tensor values = (testing::iota({5, 3}) * 7).remainder(16) / 4 + 0.125;
  const auto gradient = [&](const Op& op, const at::Tensor& x) {
    return torch::autograd::grad({op(x).sin().sum()}, {x})[0];
  };
  for (const Sizes& shape : {Sizes{2}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const auto& [name, op] : ops) {
        const at::Tensor expected = gradient(op, values.clone().requires_grad_());
        for (const Placements& placements : all_placements(2, shape.size(), false)) {
          const at::Tensor x = distribute_tensor(values.clone().requires_grad_(), mesh, placements);
          const std::string what = name + " of " + to_string(placements);
          try {
            testing::expect_close(testing::full(gradient(op, x)), expected, what);
          } catch (const std::exception& error) {
            ADD_FAILURE() << what << ": " << error.what();
          }
        }
      }
    });
  }
}

TEST(MatrixRank, OfPlainTensorsIsUntouched) {
  expect_equal(at::linalg_matrix_rank(matrices()), at::tensor({3, 2, 1, 0, 3}, at::kLong));
}

TEST(OwnTensors, QuantileRefusesNumbersAsPlainTensorsDo) {
  testing::on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(6, at::kDouble);
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    for (const double q : {-0.5, 2.0}) {
      const auto first_line = [&](const at::Tensor& t) {
        const std::string text = testing::error_text<c10::Error>([&] { at::quantile(t, q); });
        return text.substr(0, text.find('\n'));
      };
      EXPECT_EQ(first_line(x), first_line(plain));
    }
  });
}

}  // namespace
}  // namespace serried
