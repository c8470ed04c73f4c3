// Rules of views: the same elements under another shape.
#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/reshape.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Dims;
using detail::Letters;

std::string view(const Call& call) {
  const auto asked = call.integers("size");
  if (!asked) return {};
  const auto sizes = detail::resolve_sizes(call.tensor(0).numel(), *asked);
  return sizes ? detail::reshape_rule(call.tensor(0).sizes, *sizes) : std::string();
}

// Other bytes per element: the last dim is counted anew.
std::string view_dtype(const Call& call) {
  const auto to = static_cast<c10::ScalarType>(call.integer("dtype", int64_t(call.tensor(0).dtype)));
  if (c10::elementSize(to) == c10::elementSize(call.tensor(0).dtype)) return "!... -> ...";
  return "!...K -> ...J";
}

std::string moved(Letters& letters, const Dims& from, const Dims& to) {
  const std::string left = letters.slot(from);
  return letters.finish(left + " => " + letters.slot(to));
}

std::string permute(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const auto order = call.integers("dims");
  if (!order || int64_t(order->size()) != ndim) return {};
  Letters letters;
  const Dims from = letters.dims(ndim);
  Dims to;
  for (const int64_t dim : *order) {
    const int64_t place = from_front(dim, ndim);
    if (place < 0 || place >= ndim) return {};
    to.push_back(from[size_t(place)]);
  }
  return moved(letters, from, to);
}

std::string swapped(const Call& call, int64_t first, int64_t second) {
  const int64_t ndim = call.tensor(0).dim();
  if (ndim == 0) return "... => ...";
  Letters letters;
  const Dims from = letters.dims(ndim);
  Dims to = from;
  first = from_front(first, ndim);
  second = from_front(second, ndim);
  if (std::min(first, second) < 0 || std::max(first, second) >= ndim) return {};
  std::swap(to[size_t(first)], to[size_t(second)]);
  return moved(letters, from, to);
}

std::string transpose(const Call& call) {
  return swapped(call, call.integer("dim0"), call.integer("dim1"));
}

std::string t(const Call& call) {
  return call.tensor(0).dim() == 2 ? swapped(call, 0, 1) : "... => ...";
}

std::string unsqueeze(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const int64_t place = from_front(call.integer("dim"), ndim + 1);
  if (place < 0 || place > ndim) return {};
  Letters letters;
  const Dims from = letters.dims(ndim);
  return moved(letters, from, detail::with(from, place, "1"));
}

// Only dims of global size 1 go; a part may have size 1 where the whole has not, which the fix-up undoes.
std::string squeeze(const Call& call) {
  const c10::DimVector& sizes = call.tensor(0).sizes;
  const int64_t ndim = int64_t(sizes.size());
  std::vector<int64_t> asked =
      call.has("dim") ? call.integers("dim").value_or(std::vector<int64_t>()) : call.dims("dim", ndim);
  for (int64_t& dim : asked) dim = from_front(dim, ndim);
  Letters letters;
  Dims from;
  std::vector<int64_t> gone;
  for (int64_t d = 0; d < ndim; ++d) {
    from.push_back(sizes[size_t(d)] == 1 ? "1" : letters.cut());
    const bool is_asked = std::find(asked.begin(), asked.end(), d) != asked.end();
    if (sizes[size_t(d)] == 1 && is_asked) gone.push_back(d);
  }
  const std::string left = letters.slot(from);
  return letters.finish(left + " => " + letters.slot(detail::without(from, gone)) + "; squeeze");
}

std::string expand(const Call& call) {
  const auto asked = call.integers("size");
  const c10::DimVector& sizes = call.tensor(0).sizes;
  if (!asked || asked->size() < sizes.size()) return {};
  const size_t added = asked->size() - sizes.size();
  Letters letters;
  Dims from;
  Dims to;
  for (size_t d = 0; d < asked->size(); ++d) {
    const int64_t size = d < added ? -1 : sizes[d - added];
    const bool kept = d >= added && ((*asked)[d] == -1 || (*asked)[d] == size);
    const bool grows = d < added || (size == 1 && !kept);
    const std::string letter = grows ? letters.whole() : size == 1 ? "1" : letters.cut();
    if (d >= added) from.push_back(grows ? "1" : letter);
    to.push_back(letter);
  }
  const std::string left = letters.slot(from);
  return letters.finish(left + " => " + letters.slot(to) + "; size");
}

std::string unfold(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  if (ndim == 0) return " => A";
  const int64_t place = from_front(call.integer("dimension"), ndim);
  Letters letters;
  const Dims from = letters.dims(ndim, place);
  Dims to = from;
  to.at(size_t(place)) = letters.whole();
  to.push_back(letters.whole());
  return moved(letters, from, to);
}

std::string diagonal(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const std::vector<int64_t> pair = {from_front(call.integer("dim1"), ndim), from_front(call.integer("dim2", 1), ndim)};
  Letters letters;
  const Dims from = letters.dims(ndim, pair);
  Dims to = detail::without(from, pair);
  to.push_back(letters.whole());
  return moved(letters, from, to);
}

}  // namespace

RuleTable view_rules() {
  return detail::table("view", {
                                   each("... => ...", "alias detach lift lift_fresh"),
                                   each("... -> ...", "_conj _neg_view"),
                                   each(view, "view _unsafe_view _reshape_alias _reshape_copy reshape"),
                                   each(permute, "permute"),
                                   {
                                       {"diagonal", diagonal},
                                       {"expand", expand},
                                       {"squeeze", squeeze},
                                       {"t", t},
                                       {"transpose", transpose},
                                       {"unfold", unfold},
                                       {"unsqueeze", unsqueeze},
                                       {"view.dtype", view_dtype},
                                       {"view_as_complex", "...C -> ..."},
                                       {"view_as_real", "... -> ...C"},
                                   },
                               });
}

}  // namespace serried::spmd
