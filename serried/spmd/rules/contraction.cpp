// Rules of products that sum over a shared dim: the matmul family, and distances between rows.
#include <algorithm>

#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

std::string matmul(const Call& call) {
  const int64_t left = call.tensor(0).dim();
  const int64_t right = call.tensor(1).dim();
  if (left == 1) return right == 1 ? "k, k ->" : "k, ...kn -> ...n";
  return right == 1 ? "...mk, k -> ...m" : "...mk, ...kn -> ...mn";
}

// Three factors that each lack some dims of the common shape, summed over `sumdim`.
std::string trilinear(const Call& call) {
  const char* const expands[] = {"expand1", "expand2", "expand3"};
  const std::vector<int64_t> none;
  const int64_t ndim = call.tensor(0).dim() + int64_t(call.integers("expand1").value_or(none).size());
  const auto without = [&](const char* argument) {
    const std::vector<int64_t> gone = call.integers(argument).value_or(none);
    std::string text;
    for (int64_t d = 0; d < ndim; ++d) {
      const bool is_gone =
          std::any_of(gone.begin(), gone.end(), [&](int64_t dim) { return from_front(dim, ndim) == d; });
      if (!is_gone) text += char('a' + d);
    }
    return text;
  };
  std::string text = without(expands[0]);
  for (int i = 1; i < 3; ++i) text += ", " + without(expands[i]);
  return text + " -> " + without("sumdim");
}

}  // namespace

RuleTable contraction_rules() {
  return {
      "contraction",
      {
          {"_addmm_activation", "!mn, !mK, !Kn -> mn"},
          {"_cdist_backward", "...mn, !...mD, !...nD, !...mn -> ...mD; dense"},
          {"_cdist_forward", "!...mD, !...nD -> ...mn"},
          {"_compute_linear_combination", "k..., mk -> m..."},
          {"_euclidean_dist", "!...mD, !...nD -> ...mn"},
          {"_int_mm", "!mk, !kn -> mn"},  // widens, so a sum of narrow parts may wrap
          {"_pdist_backward", "N, !MD, !N -> MD"},
          {"_pdist_forward", "!MD -> N"},
          {"_trilinear", trilinear},
          {"addbmm", "mn + bmk, bkn -> mn"},
          {"addmm", "mn + mk, kn -> mn"},
          {"addmv", "m + mk, k -> m"},
          {"addr", "mn + m, n -> mn"},
          {"baddbmm", "bmn + bmk, bkn -> bmn"},
          {"bmm", "bmk, bkn -> bmn"},
          {"dot", "k, k ->"},
          {"linalg_cross", "K@dim ..., K@dim ... -> K@dim ..."},
          {"linear", "...k, nk + n? -> ...n"},
          {"matmul", matmul},
          {"mm", "mk, kn -> mn"},
          {"mv", "mk, k -> m"},
          {"vdot", "k, k ->"},
      },
  };
}

}  // namespace serried::spmd
