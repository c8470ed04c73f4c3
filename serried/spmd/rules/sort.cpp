// Rules of sorting, searching and counting.
#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Letters;

// With given bounds every part counts into the same bins.
std::string histc(const Call& call) {
  const bool bounded = call.number("min", 0) != call.number("max", 0);
  return bounded ? "!k@* -> B" : "!K@* -> B";
}

// A place in a sorted sequence is the number of smaller elements, a sum over the parts of the sequence.
std::string searchsorted(const Call& call) {
  const bool line = call.tensor(0).dim() == 1;
  const bool sorter = call.value("sorter") != nullptr;
  if (call.tensor("self") == nullptr) return sorter ? "!K, !K? ->" : "!k ->";
  if (line) return sorter ? "!K, !..., !K? -> ..." : "!k, !... -> ...";
  return sorter ? "!...K, !...j, !...K? -> ...j" : "!...k, !...j -> ...j";
}

std::string isin(const Call& call) {
  if (call.tensor("test_elements") == nullptr) return "!... -> ...";
  const std::string arrow = call.flag("invert") ? "->min" : "->max";
  if (call.tensor("elements") == nullptr) return "!k@* " + arrow;
  return "!..., !k@* " + arrow + " ...";
}

// Inverse indices lie like the input and are an empty vector where nobody asked for them.
std::string unique(const Call& call) {
  const bool counts = call.schema().returns().size() == 3;
  Letters letters;
  const std::string self = letters.slot(letters.wholes(call.tensor(0).dim()));
  const std::string inverse = call.flag("return_inverse") ? self : "Y";
  return letters.finish("!" + self + " -> X, " + inverse + (counts ? ", Z" : ""));
}

std::string unique_dim(const Call& call) {
  Letters letters;
  const std::string self = letters.slot(letters.wholes(call.tensor(0).dim()));
  return letters.finish("!" + self + " -> " + self + ", Y, Z");
}

std::string histogram(const Call& call) {
  return call.tensor("bins") != nullptr ? "!K@*, !B, !K@* -> H, E" : "!K@*, !K@* -> H, E";
}

// One dim of the result per list of bins.
std::string histogramdd(const Call& call) {
  Letters letters;
  const c10::IValue* bins = call.value("bins");
  if (bins == nullptr || !bins->isList()) return {};
  const std::string counts = letters.slot(letters.wholes(int64_t(bins->toListRef().size())));
  const bool edges = !bins->isIntList();
  return letters.finish((edges ? "!K@*, [!B], !K@* -> " : "!K@*, !K@* -> ") + counts);
}

}  // namespace

RuleTable sort_rules() {
  return detail::table("sort", {
                                   each(histogramdd, "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors"),
                                   each(unique, "_unique _unique2"),
                                   {
                                       {"_histogramdd_bin_edges", "!K@*, !K@* -> [B]"},
                                       {"bincount", "!I, I? -> B"},
                                       {"bucketize", "!..., !k -> ..."},
                                       {"bucketize.Scalar", "!k ->"},
                                       {"histc", histc},
                                       {"histogram", histogram},
                                       {"isin", isin},
                                       {"searchsorted", searchsorted},
                                       {"sort", "!K@dim ... -> K@dim ..., K@dim ..."},
                                       {"topk", "!K@dim ... -> J@dim ..., J@dim ..."},
                                       {"unique_dim", unique_dim},
                                   },
                               });
}

}  // namespace serried::spmd
