// Rules of linear algebra: matrices are whole, the batch dims before them may be cut, and so may columns to solve for.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

// An output that was not asked for has shape [0].
std::string eigh(const Call& call) {
  return call.flag("compute_v", true) ? "!...AB -> ...A, ...CD" : "!...AB -> ...A, Z";
}

std::string svd(const Call& call) {
  return call.flag("compute_uv", true) ? "!...AB -> ...CD, ...E, ...FG" : "!...AB -> Z, ...E, Y";
}

std::string qr(const Call& call) {
  return call.text("mode") == "r" ? "!...AB -> Z, ...CD" : "!...AB -> ...CD, ...EF";
}

std::string lu(const Call& call) {
  return call.flag("pivot", true) ? "!...AB -> ...CD, ...EF, ...GH" : "!...AB -> Z, ...EF, ...GH";
}

std::string lu_unpack(const Call& call) {
  const bool data = call.flag("unpack_data", true);
  const std::string pivots = call.flag("unpack_pivots", true) ? "...CD" : "Z";
  return "!...AB, !...P -> " + pivots + (data ? ", ...EF, ...GH; eye" : ", Y, X; eye");
}

// Kernels that check what they are given would raise on the zeros that a rank without elements computes on: "eye".
// Right-hand sides stand side by side, so their columns (rows, when solving from the right) may be cut.
std::string lu_solve(const Call& call) {
  return call.flag("left", true) ? "!...AB, !...A, ...An -> ...An; eye" : "!...AB, !...A, ...nA -> ...nA; eye";
}

std::string solve_triangular(const Call& call) {
  return call.flag("left", true) ? "!...AB, ...An -> ...An" : "!...AB, ...nA -> ...nA";
}

std::string ormqr(const Call& call) {
  return call.flag("left", true) ? "!...AB, !...T, ...Cn -> ...Cn" : "!...AB, !...T, ...nC -> ...nC";
}

// LU, pivots and info have the batch dims of A alone, so only batch dims that both sides have may be cut.
std::string solve_ex(const Call& call) {
  const c10::DimVector& a = call.tensor(0).sizes;
  const c10::DimVector& b = call.tensor(1).sizes;
  const bool is_vector = b.size() == 1 || (b.size() + 1 == a.size() && std::equal(b.begin(), b.end(), a.begin()));
  const size_t a_batch = a.size() - 2;
  const size_t b_batch = b.size() - (is_vector ? 1 : 2);
  std::string batch;
  for (size_t k = std::max(a_batch, b_batch); k > 0; --k) {
    const bool same = k <= a_batch && k <= b_batch && a[a_batch - k] == b[b_batch - k];
    batch += char((same ? 'a' : 'K') + batch.size());
  }
  const std::string of_a = batch.substr(batch.size() - a_batch);
  const std::string of_b = batch.substr(batch.size() - b_batch) + (is_vector ? "X" : "XY");
  const std::string of_x = batch + (is_vector ? "X" : "XY");
  return "!" + of_a + "XZ, !" + of_b + " -> " + of_x + ", " + of_a + "XZ, " + of_a + "X, " + of_a + "; eye";
}

}  // namespace

RuleTable linalg_rules() {
  return {
      "linalg",
      detail::joined({
          each("!...AB -> ...AB", "linalg_matrix_exp"),
          each("!...AB -> ...AB; eye", "cholesky cholesky_inverse"),
          each("!...AB -> ...AB, ...; eye", "linalg_cholesky_ex linalg_inv_ex"),
          each("...An, !...AB -> ...An", "_cholesky_solve_helper cholesky_solve"),
          {
              {"_linalg_det", "!...AB -> ..., ...AB, ...A"},
              {"_linalg_eigh", eigh},
              {"_linalg_eigvals", "!...AB -> ...A"},
              {"_linalg_slogdet", "!...AB -> ..., ..., ...AB, ...A"},
              {"_linalg_solve_ex", solve_ex},
              {"_linalg_svd", svd},
              {"geqrf", "!...AB -> ...AB, ...T"},
              {"linalg_eig", "!...AB -> ...A, ...CD"},
              {"linalg_householder_product", "!...AB, !...T -> ...AB"},
              {"linalg_ldl_factor_ex", "!...AB -> ...AB, ...A, ...; eye"},
              {"linalg_ldl_solve", "!...AB, !...A, ...An -> ...An; eye"},
              {"linalg_lu", lu},
              {"linalg_lu_factor_ex", "!...AB -> ...AB, ...P, ...; eye"},
              {"linalg_lu_solve", lu_solve},
              {"linalg_pinv", "!...AB, !...?, !...? -> ...BA"},
              {"linalg_qr", qr},
              {"linalg_solve_triangular", solve_triangular},
              {"lu_unpack", lu_unpack},
              {"ormqr", ormqr},
              {"triangular_solve", "!...AC, !...AB -> ...AC, ...AB"},
          },
      }),
  };
}

}  // namespace serried::spmd
