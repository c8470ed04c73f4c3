// Rules of copies and of factories that take shape and dtype from a tensor.
#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Letters;

// Whether converting parts and then reducing is converting the whole: not where a cast rounds to whole numbers or bits.
bool cast_is_linear(c10::ScalarType from, c10::ScalarType to) {
  if (from == to) return true;
  if (to == c10::ScalarType::Bool) return false;
  return c10::isIntegralType(from, true) || !c10::isIntegralType(to, true);
}

// Complex numbers have no order: of what becomes one, or was one, only sums pass.
const char* cast_arrow(c10::ScalarType from, c10::ScalarType to) {
  return c10::isComplexType(from) == c10::isComplexType(to) ? " => " : " -> ";
}

std::string to_copy(const Call& call) {
  const c10::ScalarType from = call.tensor(0).dtype;
  const auto to = static_cast<c10::ScalarType>(call.integer("dtype", int64_t(from)));
  if (!cast_is_linear(from, to)) return "!... -> ...";
  return std::string("...") + cast_arrow(from, to) + "...";
}

// The former values do not matter, but where they are Partial the copied ones must be, as the tensor stays what it is.
std::string copy(const Call& call) {
  if (call.tensors().size() < 2) return "!... -> ...";
  const c10::ScalarType from = call.tensor(1).dtype;
  const c10::ScalarType to = call.tensor(0).dtype;
  if (!cast_is_linear(from, to)) return "!..., !... -> ...";
  return std::string("... + ...") + cast_arrow(from, to) + "...";
}

std::string fill(const Call& call) {
  return call.tensors().size() < 2 ? "!... -> ...; shape" : "!..., ... => ...";
}

std::string new_like(const Call& call) {
  const auto sizes = call.integers("size");
  if (!sizes) return {};
  if (c10::IntArrayRef(*sizes) == call.tensor(0).sizes) return "!... -> ...; shape; size";
  Letters letters;
  return letters.finish("!K@* -> " + letters.slot(letters.wholes(int64_t(sizes->size()))) + "; shape");
}

}  // namespace

RuleTable like_rules() {
  return detail::table("like", {
                                   each("!... -> ...; shape", "empty_like full_like ones_like zero zeros_like"),
                                   each(new_like, "new_empty new_empty_strided new_full new_ones new_zeros"),
                                   each("!... -> A", "linspace logspace"),
                                   each("!..., !... -> A", "linspace.Tensor_Tensor logspace.Tensor_Tensor"),
                                   each("... -> ...", "_conj_physical conj_physical"),
                                   {
                                       {"_to_copy", to_copy},
                                       {"clone", "... => ..."},
                                       {"complex", "... + ... -> ..."},
                                       {"copy", copy},
                                       {"fill", fill},
                                       {"polar", "..., !... -> ..."},
                                   },
                               });
}

}  // namespace serried::spmd
