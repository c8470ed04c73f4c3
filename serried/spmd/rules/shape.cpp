// Rules of ops that cut, join, repeat and reorder: elements move, some dims change size.
#include <limits>

#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/pieces.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Dims;
using detail::Letters;
using detail::PieceRule;

// The rule of equal pieces where the call has such, else `otherwise`.
std::string by_pieces(const std::optional<detail::EqualPieces>& pieces, int64_t ndim, PieceRule kind,
                      const char* otherwise) {
  const std::string rule = pieces ? detail::piece_rule(*pieces, ndim, kind) : std::string();
  return rule.empty() ? otherwise : rule;
}

// Whether [start, end) in steps is all of a dim of `size`.
bool takes_all(const Call& call, int64_t size) {
  if (call.integer("step", 1) != 1) return false;
  const auto place = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size); };
  const int64_t end = call.integer("end", std::numeric_limits<int64_t>::max());
  return place(call.integer("start", 0)) == 0 && place(end) == size;
}

std::string slice(const Call& call) {
  const c10::DimVector& sizes = call.tensor(0).sizes;
  if (sizes.empty()) return {};
  const int64_t dim = from_front(call.integer("dim"), int64_t(sizes.size()));
  if (dim >= 0 && dim < int64_t(sizes.size()) && takes_all(call, sizes[size_t(dim)])) return "... => ...";
  constexpr const char* kGathered = "K@dim ... => J@dim ...";
  if (dim < 0 || dim >= int64_t(sizes.size())) return kGathered;
  return by_pieces(detail::pieces_of_slice(call, dim, sizes[size_t(dim)]), int64_t(sizes.size()), PieceRule::take_one,
                   kGathered);
}

std::string split(const Call& call) {
  return by_pieces(detail::pieces_of_split(call), call.tensor(0).dim(), PieceRule::take_all,
                   "K@dim ... => [J@dim ...]");
}

std::string cat(const Call& call) {
  const int64_t ndim = call.tensors().empty() ? 0 : call.tensor(0).dim();
  return by_pieces(detail::pieces_of_cat(call), ndim, PieceRule::join, "[K@dim ...] => J@dim ...");
}

std::string narrow(const Call& call) {
  const c10::DimVector& sizes = call.tensor(0).sizes;
  if (sizes.empty()) return {};
  return "K@dim ... => J@dim ...";
}

// The gradient of a slice: zeros around it, so that sums pass but not maxima.
std::string slice_backward(const Call& call) {
  const auto sizes = call.integers("input_sizes");
  if (!sizes || sizes->empty()) return {};
  const int64_t dim = from_front(call.integer("dim"), int64_t(sizes->size()));
  const int64_t whole = sizes->at(size_t(dim));
  if (takes_all(call, whole)) return "... -> ...; size";
  return by_pieces(detail::pieces_of_slice(call, dim, whole), int64_t(sizes->size()), PieceRule::put_one,
                   "K@dim ... -> J@dim ...; size");
}

std::string slice_scatter(const Call& call) {
  const c10::DimVector& sizes = call.tensor(0).sizes;
  if (sizes.empty()) return {};
  return "K@dim ... + J@dim ... => K@dim ...";
}

std::string select_backward(const Call& call) {
  const int64_t ndim = call.tensor(0).dim() + 1;
  Letters letters;
  const Dims from = letters.dims(ndim - 1);
  const Dims to = detail::with(from, from_front(call.integer("dim"), ndim), letters.whole());
  const std::string left = letters.slot(from);
  return letters.finish(left + " -> " + letters.slot(to) + "; size");
}

std::string select_scatter(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const int64_t dim = from_front(call.integer("dim"), ndim);
  Letters letters;
  const std::string self = letters.slot(letters.dims(ndim, dim));
  std::string source = self;
  if (dim >= 0 && dim < int64_t(source.size())) source.erase(size_t(dim), 1);
  return letters.finish(self + " + " + source + " => " + self);
}

// Dims of the matrices, those of the batch, and the diagonal at the end.
struct Diagonal {
  Letters letters;
  std::string matrix;
  std::string line;
};
Diagonal diagonal_of(const Call& call, int64_t ndim, int64_t dim1, int64_t dim2) {
  Diagonal result;
  const std::vector<int64_t> pair = {from_front(call.integer("dim1", dim1), ndim),
                                     from_front(call.integer("dim2", dim2), ndim)};
  const Dims matrix = result.letters.dims(ndim, pair);
  Dims line = detail::without(matrix, pair);
  line.push_back(result.letters.whole());
  result.matrix = result.letters.slot(matrix);
  result.line = result.letters.slot(line);
  return result;
}

std::string diagonal_backward(const Call& call) {
  const Diagonal d = diagonal_of(call, call.tensor(0).dim() + 1, 0, 1);
  return d.letters.finish(d.line + " -> " + d.matrix + "; size");
}

std::string diag_embed(const Call& call) {
  const Diagonal d = diagonal_of(call, call.tensor(0).dim() + 1, -2, -1);
  return d.letters.finish(d.line + " -> " + d.matrix);
}

std::string diagonal_scatter(const Call& call) {
  const Diagonal d = diagonal_of(call, call.tensor(0).dim(), 0, 1);
  return d.letters.finish(d.matrix + " + " + d.line + " => " + d.matrix);
}

std::string unfold_backward(const Call& call) {
  const int64_t ndim = call.tensor(0).dim() - 1;
  if (ndim < 1) return "A -> ; size";
  const int64_t dim = from_front(call.integer("dim"), ndim);
  Letters letters;
  const Dims to = letters.dims(ndim, dim);
  Dims from = to;
  from.push_back(letters.whole());
  const std::string left = letters.slot(from);
  return letters.finish(left + " -> " + letters.slot(to) + "; size");
}

std::string repeat(const Call& call) {
  const auto repeats = call.integers("repeats");
  const int64_t ndim = call.tensor(0).dim();
  if (!repeats || int64_t(repeats->size()) < ndim) return {};
  const size_t added = repeats->size() - size_t(ndim);
  Letters letters;
  Dims from;
  Dims to;
  for (size_t d = 0; d < repeats->size(); ++d) {
    const bool kept = d >= added && (*repeats)[d] == 1;
    if (d >= added) from.push_back(kept ? letters.cut() : letters.whole());
    to.push_back(kept ? from.back() : letters.whole());
  }
  const std::string left = letters.slot(from);
  return letters.finish(left + " => " + letters.slot(to));
}

// Dims that `name` lists are whole, sizes stay. No dims listed: none, or all where the op takes the tensor as flat.
std::string reordered(const Call& call, std::string_view name, bool flat) {
  const int64_t ndim = call.tensor(0).dim();
  std::vector<int64_t> active = call.integers(name).value_or(std::vector<int64_t>());
  if (active.empty() && flat) active = call.dims(name, ndim);
  for (int64_t& dim : active) dim = from_front(dim, ndim);
  Letters letters;
  const std::string dims = letters.slot(letters.dims(ndim, active));
  return letters.finish(dims + " => " + dims);
}

std::string flip(const Call& call) {
  return reordered(call, "dims", false);
}
std::string roll(const Call& call) {
  return reordered(call, "dims", true);
}

std::string rot90(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  std::vector<int64_t> plane = call.integers("dims").value_or(std::vector<int64_t>{0, 1});
  for (int64_t& dim : plane) dim = from_front(dim, ndim);
  Letters letters;
  const std::string from = letters.slot(letters.dims(ndim, plane));
  std::string to = from;
  const bool turns = call.integer("k", 1) % 2 != 0;
  if (turns && plane.size() == 2) std::swap(to.at(size_t(plane[0])), to.at(size_t(plane[1])));
  return letters.finish(from + " => " + to);
}

std::string constant_pad_nd(const Call& call) {
  const auto pad = call.integers("pad");
  const int64_t ndim = call.tensor(0).dim();
  if (!pad || int64_t(pad->size()) > 2 * ndim) return {};
  Letters letters;
  Dims from;
  Dims to;
  for (int64_t d = 0; d < ndim; ++d) {
    const size_t k = size_t(ndim - 1 - d) * 2;
    const bool padded = k + 1 < pad->size() && ((*pad)[k] != 0 || (*pad)[k + 1] != 0);
    from.push_back(padded ? letters.whole() : letters.cut());
    to.push_back(padded ? letters.whole() : from.back());
  }
  const std::string left = letters.slot(from);
  const bool zeros = call.number("value", 0) == 0;
  return letters.finish((zeros ? "" : "!") + left + " -> " + letters.slot(to));
}

bool same_rank(const Call& call) {
  for (const TensorArg& tensor : call.tensors()) {
    if (tensor.dim() != call.tensor(0).dim()) return false;
  }
  return !call.tensors().empty();
}

// Everything from `dim` on is flattened, padded with zeros and cut in chunks.
std::string chunk_cat(const Call& call) {
  if (!same_rank(call)) return {};
  const int64_t ndim = call.tensor(0).dim();
  const int64_t dim = from_front(call.integer("dim"), ndim);
  Letters letters;
  Dims from = letters.dims(dim);
  Dims to = from;
  for (int64_t d = dim; d < ndim; ++d) from.push_back(letters.whole());
  to.push_back(letters.whole());
  to.push_back(letters.whole());
  const std::string left = letters.slot(from);
  return letters.finish("[" + left + "] -> " + letters.slot(to));
}

std::string channel_shuffle(const Call& call) {
  Letters letters;
  const std::string dims = letters.slot(letters.dims(call.tensor(0).dim(), 1));
  return letters.finish(dims + " => " + dims);
}

}  // namespace

RuleTable shape_rules() {
  return detail::table("shape", {
                                    each(split, "split split_with_sizes unsafe_split unsafe_split_with_sizes"),
                                    each("K@dim ... => [J@dim ...]", "chunk"),
                                    {
                                        {"_chunk_cat", chunk_cat},
                                        {"_stack", "[...] => N@dim ..."},
                                        {"block_diag", "[AB] -> CD"},
                                        {"cat", cat},
                                        {"channel_shuffle", channel_shuffle},
                                        {"constant_pad_nd", constant_pad_nd},
                                        {"diag_embed", diag_embed},
                                        {"diagonal_backward", diagonal_backward},
                                        {"diagonal_scatter", diagonal_scatter},
                                        {"flip", flip},
                                        {"narrow", narrow},
                                        {"pixel_shuffle", "...CHW => ...EFG"},
                                        {"pixel_unshuffle", "...CHW => ...EFG"},
                                        {"repeat", repeat},
                                        {"roll", roll},
                                        {"rot90", rot90},
                                        {"select", "K@dim ... => ..."},
                                        {"select_backward", select_backward},
                                        {"select_scatter", select_scatter},
                                        {"slice", slice},
                                        {"slice_backward", slice_backward},
                                        {"slice_scatter", slice_scatter},
                                        {"stack", "[...] => N@dim ..."},
                                        {"tril", "...mn -> ...mn; diagonal"},
                                        {"triu", "...mn -> ...mn; diagonal"},
                                        {"unbind", "K@dim ... => [...]"},
                                        {"unfold_backward", unfold_backward},
                                    },
                                });
}

}  // namespace serried::spmd
