// Rules of calls that take a dim apart into equal pieces, or join such: projections that stand side by side in a
// matrix.
#pragma once

#include <optional>
#include <string>

#include "serried/spmd/op_call.h"

namespace serried::spmd::detail {

/// A dim of `count` pieces of `size` elements, at least two.
struct EqualPieces {
  int64_t dim;
  int64_t count;
  int64_t size;
};

/// Whether [start, end) is one of equal pieces of a dim of `whole` elements.
std::optional<EqualPieces> pieces_of_slice(const Call& call, int64_t dim, int64_t whole);
/// Whether a split gives equal pieces.
std::optional<EqualPieces> pieces_of_split(const Call& call);
/// Whether a cat joins equal pieces.
std::optional<EqualPieces> pieces_of_cat(const Call& call);

/// Part r of every piece on rank r, `S/count`, is part r of the piece. From the whole, ab(d=3 c) => abc, or the other
/// way round. Empty where there are more dims than a rule has room for.
enum class PieceRule { take_one, take_all, join, put_one };
std::string piece_rule(const EqualPieces& pieces, int64_t ndim, PieceRule kind);

}  // namespace serried::spmd::detail
