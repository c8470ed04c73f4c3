// Rules of reductions and scans.
#include <cmath>

#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Letters;

// max and min are three ops each: of all elements, along a dim with indices, and of two tensors.
std::string extremum(const Call& call, const char* whole) {
  if (call.has("other")) return "!..., !... -> ...";
  return call.has("dim") ? "!K@dim ... -> ..., ..." : whole;
}
std::string max(const Call& call) {
  return extremum(call, "k@* ->max");
}
std::string min(const Call& call) {
  return extremum(call, "k@* ->min");
}

// Along a dim values come with indices.
std::string median(const Call& call) {
  return call.has("dim") ? "!K@dim ... -> ..., ..." : "!K@* ->";
}

// Norms that are a sum, a maximum or a minimum of absolute values go part by part; the others are decomposed before
// they come here, unless the dims are whole.
std::string norm(const Call& call) {
  const double order = call.number(call.has("ord") ? "ord" : "p", 2);
  if (order == 0 || order == 1) return "!k@dim ... -> ...";
  if (std::isinf(order)) return order > 0 ? "!k@dim ... ->max ..." : "!k@dim ... ->min ...";
  return "!K@dim ... -> ...";
}

std::string renorm(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const int64_t kept = from_front(call.integer("dim"), ndim);
  std::vector<int64_t> reduced;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != kept) reduced.push_back(d);
  }
  Letters letters;
  const std::string dims = letters.slot(letters.dims(ndim, reduced));
  return letters.finish("!" + dims + " -> " + dims);
}

}  // namespace

RuleTable reduction_rules() {
  return detail::table("reduction", {
                                        each("!K@dim ... -> ...", "argmax argmin hash_tensor logsumexp std var"),
                                        each("!K@dim ... -> ..., ...", "aminmax kthvalue mode std_mean var_mean"),
                                        each("!K@dim ... -> K@dim ...", "cumprod logcumsumexp _logcumsumexp"),
                                        each("!K@dim ... -> K@dim ..., K@dim ...", "cummax cummin"),
                                        each(median, "median nanmedian"),
                                        each(norm, "linalg_vector_norm norm"),
                                        {
                                            {"all", "!k@dim ... ->min ..."},
                                            {"amax", "k@dim ... ->max ..."},
                                            {"amin", "k@dim ... ->min ..."},
                                            {"any", "!k@dim ... ->max ..."},
                                            {"count_nonzero", "!k@dim ... -> ..."},
                                            {"cumsum", "K@dim ... -> K@dim ..."},
                                            {"max", max},
                                            {"mean", "k@dim ... -> ...; mean"},
                                            {"min", min},
                                            {"nansum", "!k@dim ... -> ..."},
                                            {"prod", "k@dim ... ->prod ..."},
                                            {"renorm", renorm},
                                            {"sum", "k@dim ... -> ..."},
                                            {"trace", "AB ->"},
                                        },
                                    });
}

}  // namespace serried::spmd
