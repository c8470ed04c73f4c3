// Linear algebra on batches with fewer matrices than ranks: some ranks have none and must not be seen to.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using T = at::Tensor;
using Tensors = std::vector<T>;

struct MatrixCase {
  const char* name;
  std::function<Tensors(at::IntArrayRef batch)> inputs;
  std::function<Tensors(const Tensors&)> run;
};

std::vector<int64_t> with(at::IntArrayRef batch, std::initializer_list<int64_t> dims) {
  std::vector<int64_t> sizes = batch.vec();
  sizes.insert(sizes.end(), dims);
  return sizes;
}

T general(at::IntArrayRef batch, int64_t rows = 3, int64_t columns = 3) {
  return at::randn(with(batch, {rows, columns}), at::kDouble) + 3 * at::eye(rows, columns, at::kDouble);
}

T positive(at::IntArrayRef batch) {
  const T a = general(batch);
  return a.matmul(a.mT()) + at::eye(3, at::kDouble);
}

T factor(at::IntArrayRef batch) {
  return at::linalg_cholesky(positive(batch));
}

Tensors square(at::IntArrayRef batch) {
  return {general(batch)};
}
Tensors spd(at::IntArrayRef batch) {
  return {positive(batch)};
}
Tensors tall(at::IntArrayRef batch) {
  return {general(batch, 4, 3)};
}
Tensors wide(at::IntArrayRef batch) {
  return {general(batch, 2, 4)};
}
// Ranks 2 and 1 by turns.
Tensors deficient(at::IntArrayRef batch) {
  const T left = at::randn(with(batch, {4, 2}), at::kDouble);
  left.flatten(0, -3).slice(0, 1, std::nullopt, 2).select(-1, 1).zero_();
  return {left.matmul(at::randn(with(batch, {2, 3}), at::kDouble))};
}
Tensors lower(at::IntArrayRef batch) {
  return {factor(batch)};
}
Tensors square_and_right(at::IntArrayRef batch) {
  return {general(batch), at::randn(with(batch, {3, 2}), at::kDouble)};
}
Tensors lower_and_right(at::IntArrayRef batch) {
  return {factor(batch), at::randn(with(batch, {3, 2}), at::kDouble)};
}
Tensors lu_and_right(at::IntArrayRef batch) {
  const auto [lu, pivots] = at::linalg_lu_factor(general(batch));
  return {lu, pivots, at::randn(with(batch, {3, 2}), at::kDouble)};
}
Tensors ldl_and_right(at::IntArrayRef batch) {
  const auto [ld, pivots] = at::linalg_ldl_factor(positive(batch));
  return {ld, pivots, at::randn(with(batch, {3, 2}), at::kDouble)};
}
Tensors reflectors(at::IntArrayRef batch) {
  const auto [a, tau] = at::geqrf(general(batch, 4, 3));
  return {a, tau, at::randn(with(batch, {4, 2}), at::kDouble)};
}

// One matrix of the batch.
T first(const T& batch) {
  return batch.flatten(0, -3).select(0, 0);
}

template <class... R>
Tensors all(const std::tuple<R...>& results) {
  Tensors tensors;
  std::apply([&](const R&... r) { (tensors.push_back(r), ...); }, results);
  return tensors;
}

// Signs of singular and eigenvectors are the kernel's choice, and the same for one matrix: results are compared as they
// are.
const std::vector<MatrixCase>& matrix_cases() {
  static const std::vector<MatrixCase> list = {
      {"cholesky", spd, [](const Tensors& t) { return Tensors{at::cholesky(t[0])}; }},
      {"cholesky upper", spd, [](const Tensors& t) { return Tensors{at::cholesky(t[0], true)}; }},
      {"linalg_cholesky", spd, [](const Tensors& t) { return Tensors{at::linalg_cholesky(t[0])}; }},
      {"linalg_cholesky_ex", spd, [](const Tensors& t) { return all(at::linalg_cholesky_ex(t[0], false, true)); }},
      {"cholesky_inverse", lower, [](const Tensors& t) { return Tensors{at::cholesky_inverse(t[0])}; }},
      {"cholesky_solve", lower_and_right, [](const Tensors& t) { return Tensors{at::cholesky_solve(t[1], t[0])}; }},
      {"inverse", square, [](const Tensors& t) { return Tensors{at::inverse(t[0])}; }},
      {"linalg_inv", square, [](const Tensors& t) { return Tensors{at::linalg_inv(t[0])}; }},
      {"linalg_inv_ex", square, [](const Tensors& t) { return all(at::linalg_inv_ex(t[0], true)); }},
      {"det", square, [](const Tensors& t) { return Tensors{at::det(t[0])}; }},
      {"linalg_det", square, [](const Tensors& t) { return Tensors{at::linalg_det(t[0])}; }},
      {"logdet", spd, [](const Tensors& t) { return Tensors{at::logdet(t[0])}; }},
      {"slogdet", square, [](const Tensors& t) { return all(at::slogdet(t[0])); }},
      {"linalg_slogdet", square, [](const Tensors& t) { return all(at::linalg_slogdet(t[0])); }},
      {"lu_unpack", lu_and_right, [](const Tensors& t) { return all(at::lu_unpack(t[0], t[1])); }},
      {"lu_unpack pivots", lu_and_right,
       [](const Tensors& t) { return Tensors{std::get<0>(at::lu_unpack(t[0], t[1], false))}; }},
      {"lu_solve", lu_and_right, [](const Tensors& t) { return Tensors{at::lu_solve(t[2], t[0], t[1])}; }},
      {"linalg_lu", square, [](const Tensors& t) { return all(at::linalg_lu(t[0])); }},
      {"linalg_lu_factor", square, [](const Tensors& t) { return all(at::linalg_lu_factor(t[0])); }},
      {"linalg_lu_factor_ex", square, [](const Tensors& t) { return all(at::linalg_lu_factor_ex(t[0], true, true)); }},
      {"_lu_with_info", square, [](const Tensors& t) { return all(at::_lu_with_info(t[0])); }},
      {"linalg_lu_solve", lu_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_lu_solve(t[0], t[1], t[2])}; }},
      {"linalg_lu_solve from the right", lu_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_lu_solve(t[0], t[1], t[2].mT(), false)}; }},
      {"linalg_ldl_factor", spd, [](const Tensors& t) { return all(at::linalg_ldl_factor(t[0])); }},
      {"linalg_ldl_factor_ex", spd, [](const Tensors& t) { return all(at::linalg_ldl_factor_ex(t[0], false, true)); }},
      {"linalg_ldl_solve", ldl_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_ldl_solve(t[0], t[1], t[2])}; }},
      {"triangular_solve", lower_and_right,
       [](const Tensors& t) { return all(at::triangular_solve(t[1], t[0], false)); }},
      {"linalg_solve_triangular", lower_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_solve_triangular(t[0], t[1], false)}; }},
      {"linalg_solve", square_and_right, [](const Tensors& t) { return Tensors{at::linalg_solve(t[0], t[1])}; }},
      {"linalg_solve from the right", square_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_solve(t[0], t[1].mT(), false)}; }},
      {"linalg_solve_ex", square_and_right,
       [](const Tensors& t) { return all(at::linalg_solve_ex(t[0], t[1], true, true)); }},
      {"linalg_tensorinv", square, [](const Tensors& t) { return Tensors{at::linalg_tensorinv(first(t[0]), 1)}; }},
      {"linalg_tensorsolve", square_and_right,
       [](const Tensors& t) { return Tensors{at::linalg_tensorsolve(first(t[0]), first(t[1]).select(1, 0))}; }},
      {"linalg_lstsq", tall,
       [](const Tensors& t) { return Tensors{std::get<0>(at::linalg_lstsq(t[0], t[0].narrow(-1, 0, 2)))}; }},
      {"geqrf", tall, [](const Tensors& t) { return all(at::geqrf(t[0])); }},
      {"orgqr", reflectors, [](const Tensors& t) { return Tensors{at::orgqr(t[0], t[1])}; }},
      {"linalg_householder_product", reflectors,
       [](const Tensors& t) { return Tensors{at::linalg_householder_product(t[0], t[1])}; }},
      {"ormqr", reflectors, [](const Tensors& t) { return Tensors{at::ormqr(t[0], t[1], t[2])}; }},
      {"linalg_qr", tall, [](const Tensors& t) { return all(at::linalg_qr(t[0])); }},
      {"linalg_qr r", wide, [](const Tensors& t) { return Tensors{std::get<1>(at::linalg_qr(t[0], "r"))}; }},
      {"qr", tall, [](const Tensors& t) { return all(at::qr(t[0])); }},
      {"svd", tall, [](const Tensors& t) { return all(at::svd(t[0])); }},
      {"linalg_svd", wide, [](const Tensors& t) { return all(at::linalg_svd(t[0], false)); }},
      {"linalg_svdvals", tall, [](const Tensors& t) { return Tensors{at::linalg_svdvals(t[0])}; }},
      {"linalg_eig", spd, [](const Tensors& t) { return all(at::linalg_eig(t[0])); }},
      {"linalg_eigvals", spd, [](const Tensors& t) { return Tensors{at::linalg_eigvals(t[0])}; }},
      {"linalg_eigh", spd, [](const Tensors& t) { return all(at::linalg_eigh(t[0])); }},
      {"linalg_eigvalsh", spd, [](const Tensors& t) { return Tensors{at::linalg_eigvalsh(t[0])}; }},
      {"pinverse", tall, [](const Tensors& t) { return Tensors{at::pinverse(t[0])}; }},
      {"linalg_pinv", wide, [](const Tensors& t) { return Tensors{at::linalg_pinv(t[0])}; }},
      {"linalg_pinv hermitian", spd, [](const Tensors& t) { return Tensors{at::linalg_pinv(t[0], 1e-15, true)}; }},
      {"matrix_exp", square, [](const Tensors& t) { return Tensors{at::matrix_exp(t[0] / 4)}; }},
      {"linalg_matrix_power", square, [](const Tensors& t) { return Tensors{at::linalg_matrix_power(t[0], -2)}; }},
      {"matrix_power", square, [](const Tensors& t) { return Tensors{at::matrix_power(t[0], 3)}; }},
      {"linalg_matrix_norm", square, [](const Tensors& t) { return Tensors{at::linalg_matrix_norm(t[0], "nuc")}; }},
      {"linalg_matrix_norm 2", square, [](const Tensors& t) { return Tensors{at::linalg_matrix_norm(t[0], 2)}; }},
      {"linalg_cond", square, [](const Tensors& t) { return Tensors{at::linalg_cond(t[0])}; }},
      {"linalg_cond inf", square, [](const Tensors& t) { return Tensors{at::linalg_cond(t[0], INFINITY)}; }},
      {"linalg_cond -2", tall, [](const Tensors& t) { return Tensors{at::linalg_cond(t[0], -2)}; }},
      {"linalg_cond fro", square, [](const Tensors& t) { return Tensors{at::linalg_cond(t[0], "fro")}; }},
      {"linalg_cond nuc", square, [](const Tensors& t) { return Tensors{at::linalg_cond(t[0], "nuc")}; }},
      {"linalg_matrix_rank", deficient, [](const Tensors& t) { return Tensors{at::linalg_matrix_rank(t[0])}; }},
      {"linalg_matrix_rank hermitian", spd,
       [](const Tensors& t) { return Tensors{at::linalg_matrix_rank(t[0], std::nullopt, 1e-3, true)}; }},
      {"linalg_matrix_rank of numbers", deficient,
       [](const Tensors& t) {
         return Tensors{at::linalg_matrix_rank(t[0], std::optional<double>(1e-3), std::optional<double>(1e-4))};
       }},
      {"linalg_matrix_rank of tensors", deficient,
       [](const Tensors& t) {
         return Tensors{at::linalg_matrix_rank(t[0], std::optional<T>(t[0].select(-1, 0).select(-1, 0).abs() * 1e-3),
                                               std::optional<T>())};
       }},
      {"linalg_matrix_rank tol", deficient,
       [](const Tensors& t) { return Tensors{at::linalg_matrix_rank(t[0], 0.5)}; }},
      {"linalg_matrix_rank of a tol tensor", deficient,
       [](const Tensors& t) {
         return Tensors{at::linalg_matrix_rank(t[0], t[0].select(-1, 0).select(-1, 0).abs() * 0.25)};
       }},
      {"linalg_matrix_rank of a matrix", deficient,
       [](const Tensors& t) { return Tensors{at::linalg_matrix_rank(first(t[0]))}; }},
      {"linalg_matrix_rank of nothing", deficient,
       [](const Tensors& t) { return Tensors{at::linalg_matrix_rank(t[0].narrow(-1, 0, 0))}; }},
      {"linalg_pinv of tensors", wide,
       [](const Tensors& t) {
         return Tensors{at::linalg_pinv(t[0], std::optional<T>(t[0].select(-1, 0).select(-1, 0).abs() * 1e-3),
                                        std::optional<T>())};
       }},
      {"linalg_pinv rcond", wide, [](const Tensors& t) { return Tensors{at::linalg_pinv(t[0], 1e-3)}; }},
      {"linalg_pinv of an rcond tensor", wide,
       [](const Tensors& t) { return Tensors{at::linalg_pinv(t[0], t[0].select(-1, 0).select(-1, 0).abs() * 1e-3)}; }},
      {"linalg_norm", square, [](const Tensors& t) { return Tensors{at::linalg_norm(t[0])}; }},
      {"linalg_norm nuc", square,
       [](const Tensors& t) {
         return Tensors{at::linalg_norm(t[0], "nuc", at::IntArrayRef{-2, -1})};
       }},
      {"linalg_norm -2", square,
       [](const Tensors& t) {
         return Tensors{at::linalg_norm(t[0], -2, at::IntArrayRef{-2, -1}, true)};
       }},
      {"linalg_matrix_norm inf", square,
       [](const Tensors& t) { return Tensors{at::linalg_matrix_norm(t[0], INFINITY)}; }},
      {"linalg_vector_norm", square,
       [](const Tensors& t) { return Tensors{at::linalg_vector_norm(t[0], 3, at::IntArrayRef{-1})}; }},
      {"nuclear_norm", square, [](const Tensors& t) { return Tensors{at::nuclear_norm(first(t[0]))}; }},
      {"nuclear_norm of dims", square,
       [](const Tensors& t) {
         return Tensors{at::nuclear_norm(t[0], {-2, -1}, true)};
       }},
      {"frobenius_norm", square,
       [](const Tensors& t) {
         return Tensors{at::frobenius_norm(t[0], {-2, -1})};
       }},
      {"chain_matmul", square,
       [](const Tensors& t) {
         return Tensors{at::chain_matmul({first(t[0]), first(t[0]), first(t[0])})};
       }},
      {"linalg_diagonal", square, [](const Tensors& t) { return Tensors{at::linalg_diagonal(t[0])}; }},
      {"linalg_matmul", square, [](const Tensors& t) { return Tensors{at::linalg_matmul(t[0], t[0])}; }},
      {"norm_except_dim", square, [](const Tensors& t) { return Tensors{at::norm_except_dim(t[0], 2, 0)}; }},
      {"adjoint", square, [](const Tensors& t) { return Tensors{at::adjoint(t[0])}; }},
      {"linalg_eigh U", spd, [](const Tensors& t) { return Tensors{std::get<0>(at::linalg_eigh(t[0], "U"))}; }},
      {"cumulative_trapezoid", square, [](const Tensors& t) { return Tensors{at::cumulative_trapezoid(t[0])}; }},
      {"tensordot", square, [](const Tensors& t) { return Tensors{at::tensordot(t[0], t[0], {-1}, {-1})}; }},
      {"ger", square,
       [](const Tensors& t) { return Tensors{at::ger(first(t[0]).select(0, 0), first(t[0]).select(0, 1))}; }},
      {"linalg_multi_dot", square,
       [](const Tensors& t) {
         return Tensors{at::linalg_multi_dot({first(t[0]), first(t[0]), first(t[0])})};
       }},
      {"linalg_vander", square, [](const Tensors& t) { return Tensors{at::linalg_vander(t[0])}; }},
      {"linalg_cross", square, [](const Tensors& t) { return Tensors{at::linalg_cross(t[0], t[0].flip(-1))}; }},
      {"cross", square, [](const Tensors& t) { return Tensors{at::cross(t[0], t[0] + 1, -1)}; }},
      {"linalg_vecdot", square, [](const Tensors& t) { return Tensors{at::linalg_vecdot(t[0], t[0] + 1)}; }},
      {"cdist", tall, [](const Tensors& t) { return Tensors{at::cdist(t[0], t[0] + 1)}; }},
      {"kron", square, [](const Tensors& t) { return Tensors{at::kron(t[0], t[0])}; }},
      {"trapezoid", square, [](const Tensors& t) { return Tensors{at::trapezoid(t[0])}; }},
      {"cov", square, [](const Tensors& t) { return Tensors{at::cov(first(t[0]))}; }},
      {"corrcoef", square, [](const Tensors& t) { return Tensors{at::corrcoef(first(t[0]))}; }},
  };
  return list;
}

Tensors inputs_of(const MatrixCase& c, at::IntArrayRef batch) {
  return seeded(21, [&] { return c.inputs(batch); });
}

Tensors placed(const Tensors& plain, const DeviceMesh& mesh, const Placements& placements) {
  Tensors tensors;
  for (const T& t : plain) tensors.push_back(place(t.contiguous(), mesh, placements));
  return tensors;
}

void expect_near(const T& actual, const T& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.dtype(), expected.dtype()) << what;
  const bool numbers = expected.is_floating_point() || expected.is_complex();
  EXPECT_TRUE(numbers ? at::allclose(actual, expected, 1e-8, 1e-8) : actual.equal(expected)) << what;
}

void check_case(const MatrixCase& c, at::IntArrayRef batch, const DeviceMesh& mesh, const Placements& placements) {
  const std::string what = c10::str(c.name, " of batch ", batch, " as ", to_string(placements));
  const Tensors plain = inputs_of(c, batch);
  const Tensors expected = c.run(plain);
  Tensors actual;
  try {
    actual = c.run(placed(plain, mesh, placements));
  } catch (const std::exception& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) expect_near(full(actual[i]), expected[i], what);
}

TEST(EmptyParts, LinearAlgebraOnBatchesSmallerThanTheMesh) {
  for (const Sizes& shape : {Sizes{2}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const MatrixCase& c : matrix_cases()) {
        for (const Sizes& batch : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{1, 2}}) {
          check_case(c, batch, mesh, Placements(shape.size(), Shard(0)));
        }
      }
    });
  }
}

// Gradients of what has a unique value.
TEST(EmptyParts, GradientsOfLinearAlgebra) {
  const std::vector<std::string_view> names = {"cholesky",
                                               "linalg_cholesky",
                                               "cholesky_inverse",
                                               "cholesky_solve",
                                               "inverse",
                                               "linalg_inv_ex",
                                               "det",
                                               "logdet",
                                               "slogdet",
                                               "linalg_solve",
                                               "linalg_solve_triangular",
                                               "triangular_solve",
                                               "linalg_svdvals",
                                               "linalg_eigvalsh",
                                               "pinverse",
                                               "matrix_exp",
                                               "linalg_matrix_power",
                                               "linalg_lstsq",
                                               "linalg_qr",
                                               "linalg_lu",
                                               "linalg_lu_solve",
                                               "linalg_householder_product",
                                               "linalg_cross",
                                               "cdist",
                                               "linalg_vander"};
  const auto gradients = [](const MatrixCase& c, Tensors inputs) {
    T loss;
    Tensors leaves;
    for (T& t : inputs) {
      if (t.is_floating_point()) leaves.push_back(t.detach().requires_grad_()), t = leaves.back();
    }
    for (const T& result : c.run(inputs)) {
      if (!result.requires_grad()) continue;
      loss = loss.defined() ? loss + result.sin().sum() : result.sin().sum();
    }
    Tensors grads;
    for (const T& g : torch::autograd::grad({loss}, leaves, {}, std::nullopt, false, true)) {
      if (g.defined()) grads.push_back(full(g));
    }
    return grads;
  };
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    for (const std::string_view name : names) {
      const auto is_it = [&](const MatrixCase& c) { return c.name == name; };
      const auto found = std::find_if(matrix_cases().begin(), matrix_cases().end(), is_it);
      ASSERT_NE(found, matrix_cases().end()) << name;
      const MatrixCase& c = *found;
      const Tensors plain = inputs_of(c, {2});
      const Tensors expected = gradients(c, plain);
      ASSERT_FALSE(expected.empty()) << name;
      Tensors actual;
      try {
        actual = gradients(c, placed(plain, mesh, {Shard(0)}));
      } catch (const std::exception& error) {
        throw std::runtime_error(c10::str(c.name, ": ", error.what()));
      }
      ASSERT_EQ(actual.size(), expected.size()) << c.name;
      for (size_t i = 0; i < expected.size(); ++i) expect_near(actual[i], expected[i], c.name);
    }
  });
}

}  // namespace
}  // namespace serried::testing
