// Composites that make an output of their own: matrix_rank in all its forms, on every placement.
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
      {"atol", [](const at::Tensor& x) { return at::linalg_matrix_rank(x, 1.5, std::nullopt); }},
      {"atol, rtol", [](const at::Tensor& x) { return at::linalg_matrix_rank(x, 0.5, 0.9); }},
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

TEST(MatrixRank, OfPlainTensorsIsUntouched) {
  expect_equal(at::linalg_matrix_rank(matrices()), at::tensor({3, 2, 1, 0, 3}, at::kLong));
}

}  // namespace
}  // namespace serried
