// Rules of calls that take a dim apart into equal pieces, or join such: projections that stand side by side in a
// matrix.
#include "serried/spmd/rules/pieces.h"

#include <algorithm>
#include <limits>

#include "serried/spmd/rules/letters.h"

namespace serried::spmd::detail {
namespace {

std::optional<EqualPieces> equal_pieces(int64_t dim, int64_t whole, int64_t size) {
  if (size <= 0 || size >= whole || whole % size != 0) return std::nullopt;
  return EqualPieces{dim, whole / size, size};
}

}  // namespace

std::optional<EqualPieces> pieces_of_slice(const Call& call, int64_t dim, int64_t whole) {
  if (call.integer("step", 1) != 1) return std::nullopt;
  const auto place = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + whole : i, 0, whole); };
  const int64_t start = place(call.integer("start", 0));
  const int64_t size = place(call.integer("end", std::numeric_limits<int64_t>::max())) - start;
  if (size <= 0 || start % size != 0) return std::nullopt;
  return equal_pieces(dim, whole, size);
}

std::optional<EqualPieces> pieces_of_split(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const int64_t dim = from_front(call.integer("dim"), ndim);
  if (dim < 0 || dim >= ndim) return std::nullopt;
  auto sizes = call.integers(call.has("split_sizes") ? "split_sizes" : "split_size");
  if (!sizes || sizes->empty()) return std::nullopt;
  if (std::any_of(sizes->begin(), sizes->end(), [&](int64_t size) { return size != sizes->front(); })) {
    return std::nullopt;
  }
  return equal_pieces(dim, call.tensor(0).sizes[size_t(dim)], sizes->front());
}

std::optional<EqualPieces> pieces_of_cat(const Call& call) {
  const int64_t count = int64_t(call.tensors().size());
  if (count < 2) return std::nullopt;
  const c10::DimVector& sizes = call.tensor(0).sizes;
  const int64_t dim = from_front(call.integer("dim"), int64_t(sizes.size()));
  if (dim < 0 || dim >= int64_t(sizes.size()) || sizes[size_t(dim)] == 0) return std::nullopt;
  for (const TensorArg& tensor : call.tensors()) {
    if (tensor.sizes != sizes) return std::nullopt;
  }
  return EqualPieces{dim, count, sizes[size_t(dim)]};
}

std::string piece_rule(const EqualPieces& pieces, int64_t ndim, PieceRule kind) {
  Letters letters;
  Dims one = letters.dims(ndim);
  Dims all = one;
  // Which piece an element is in: the one letter that no rank could be given a part of, since the other side lacks it.
  all[size_t(pieces.dim)] =
      c10::str("(", letters.cut(), "=", pieces.count, " ", one[size_t(pieces.dim)], "=", pieces.size, ")");
  const std::string piece = letters.slot(one);
  const std::string whole = letters.slot(all);
  switch (kind) {
    case PieceRule::take_one: return letters.finish(whole + " => " + piece + "; pieces");
    case PieceRule::take_all: return letters.finish(whole + " => [" + piece + "]; pieces");
    case PieceRule::join: return letters.finish("[" + piece + "] => " + whole);
    case PieceRule::put_one: return letters.finish(piece + " -> " + whole + "; size; pieces");
  }
  return {};
}

}  // namespace serried::spmd::detail
