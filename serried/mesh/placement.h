// How a tensor lies on one axis of a mesh: replicated, cut along a dim, or pending a reduction.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace serried {

/// How the ranks' values of a Partial become one.
enum class ReduceKind : uint8_t { sum, avg, min, max, product, band, bor, bxor };

/// "sum", "avg", ...
std::string_view to_string(ReduceKind kind);

/// One axis' placement; a small value, compared by content. Made by Replicate(), Shard(dim), StridedShard(dim, n),
/// BalancedShard(dim), Partial(kind).
class Placement {
 public:
  constexpr Placement() = default;

  constexpr bool is_replicate() const { return kind_ == Kind::replicate; }
  /// Cut along a dim, in whatever order.
  constexpr bool is_shard() const { return kind_ == Kind::shard; }
  constexpr bool is_shard(int64_t dim) const { return kind_ == Kind::shard && dim_ == dim; }
  /// Cut in another order than Shard: a rank may hold several runs of indices. See StridedShard and BalancedShard.
  constexpr bool is_strided() const { return split_ != 1; }
  /// Cut from both ends: see BalancedShard.
  constexpr bool is_balanced() const { return split_ == kBalanced; }
  constexpr bool is_partial() const { return kind_ == Kind::partial; }
  constexpr bool is_partial(ReduceKind kind) const { return kind_ == Kind::partial && reduce_ == kind; }

  /// The cut dim; -1 where there is none.
  constexpr int64_t dim() const { return dim_; }
  /// Into how many pieces the dim is cut before each piece is cut over the ranks; 1 for Shard, -1 for BalancedShard,
  /// whose pieces depend on the number of ranks.
  constexpr int64_t split_factor() const { return split_; }
  constexpr ReduceKind reduce() const { return reduce_; }
  /// The same cut along another dim.
  constexpr Placement along(int64_t dim) const { return make_shard(dim, split_); }

  constexpr bool operator==(const Placement&) const = default;

  /// All content in one word: a hash without collisions.
  constexpr uint64_t bits() const {
    return uint64_t(kind_) | uint64_t(reduce_) << 2 | uint64_t(uint16_t(dim_)) << 8 | uint64_t(uint32_t(split_)) << 32;
  }

  static constexpr Placement make_shard(int64_t dim, int64_t split) { return {Kind::shard, {}, dim, split}; }
  static constexpr Placement make_balanced_shard(int64_t dim) { return make_shard(dim, kBalanced); }
  static constexpr Placement make_partial(ReduceKind kind) { return {Kind::partial, kind, -1, 1}; }

 private:
  enum class Kind : uint8_t { replicate, shard, partial };
  static constexpr int32_t kBalanced = -1;
  constexpr Placement(Kind kind, ReduceKind reduce, int64_t dim, int64_t split)
      : kind_(kind), reduce_(reduce), dim_(int16_t(dim)), split_(int32_t(split)) {}

  Kind kind_ = Kind::replicate;
  ReduceKind reduce_ = ReduceKind::sum;
  int16_t dim_ = -1;
  int32_t split_ = 1;
};

/// One placement per mesh axis.
using Placements = std::vector<Placement>;

/// Every rank of the axis holds the whole.
constexpr Placement Replicate() {
  return {};
}

/// Cut along `dim`: ceil(size / ranks) each, the last ranks less or nothing. A negative dim counts from the back and
/// is resolved where the tensor is known.
constexpr Placement Shard(int64_t dim) {
  return Placement::make_shard(dim, 1);
}

/// Cut along `dim` after a cut into `split_factor` pieces: rank r holds part r of every piece. Says that an axis
/// further right cuts the dim first, or that the dim was merged from (split_factor, sharded).
constexpr Placement StridedShard(int64_t dim, int64_t split_factor) {
  // Less than one is refused where the placement is used; -1 must not pass for a balanced cut.
  return Placement::make_shard(dim, split_factor < 1 ? 0 : split_factor);
}

/// Cut along `dim` into 2n chunks over n ranks, which differ by at most one in length; rank r holds chunks r and
/// 2n-1-r. Under a causal mask every rank then has as much to do, for any length. Where there are fewer indices than
/// chunks, some chunks are empty.
///     10 over 2 ranks  ->  [0,3) and [8,10), [3,6) and [6,8)
constexpr Placement BalancedShard(int64_t dim) {
  return Placement::make_balanced_shard(dim);
}

/// The value is the reduction of what the ranks hold.
constexpr Placement Partial(ReduceKind kind) {
  return Placement::make_partial(kind);
}

/// By name: sum avg min max product band bor bxor; ValueError that lists them for any other.
Placement Partial(std::string_view kind = "sum");

/// "R", "S0", "S0/2" (strided), "S0~" (balanced), "P", "P(max)"
std::string to_string(const Placement& placement);

/// "S0 R": the same text in logs, errors, docs and on the command line.
std::string to_string(const Placements& placements);

/// What `to_string` gives, back; ValueError that marks the word it does not know.
Placements parse_placements(std::string_view text);

std::ostream& operator<<(std::ostream& out, const Placement& placement);
std::ostream& operator<<(std::ostream& out, const Placements& placements);

/// The same with dims counted from the front. IndexError for a dim the tensor does not have, ValueError for a number of
/// placements other than `mesh_ndim` or for kinds of Partial that do not mix (only sum and avg do).
Placements checked_placements(std::string_view where, Placements placements, int64_t tensor_ndim, int64_t mesh_ndim);

/// Every Partial replaced by Replicate.
Placements without_partial(Placements placements);

}  // namespace serried
