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
/// Partial(kind).
class Placement {
 public:
  constexpr Placement() = default;

  constexpr bool is_replicate() const { return kind_ == Kind::replicate; }
  /// Cut along a dim, strided or not.
  constexpr bool is_shard() const { return kind_ == Kind::shard; }
  constexpr bool is_shard(int64_t dim) const { return kind_ == Kind::shard && dim_ == dim; }
  /// Cut in the order that lets a later axis come first: see StridedShard.
  constexpr bool is_strided() const { return split_ != 1; }
  constexpr bool is_partial() const { return kind_ == Kind::partial; }
  constexpr bool is_partial(ReduceKind kind) const { return kind_ == Kind::partial && reduce_ == kind; }

  /// The cut dim; -1 where there is none.
  constexpr int64_t dim() const { return dim_; }
  /// Into how many pieces the dim is cut before each piece is cut over the ranks; 1 for Shard.
  constexpr int64_t split_factor() const { return split_; }
  constexpr ReduceKind reduce() const { return reduce_; }

  constexpr bool operator==(const Placement&) const = default;

  /// All content in one word: a hash without collisions.
  constexpr uint64_t bits() const {
    return uint64_t(kind_) | uint64_t(reduce_) << 2 | uint64_t(uint16_t(dim_)) << 8 | uint64_t(uint32_t(split_)) << 32;
  }

  static constexpr Placement make_shard(int64_t dim, int64_t split) { return {Kind::shard, {}, dim, split}; }
  static constexpr Placement make_partial(ReduceKind kind) { return {Kind::partial, kind, -1, 1}; }

 private:
  enum class Kind : uint8_t { replicate, shard, partial };
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
  return Placement::make_shard(dim, split_factor);
}

/// The value is the reduction of what the ranks hold.
constexpr Placement Partial(ReduceKind kind) {
  return Placement::make_partial(kind);
}

/// By name: sum avg min max product band bor bxor; ValueError that lists them for any other.
Placement Partial(std::string_view kind = "sum");

/// "R", "S0", "S0/2" (strided), "P", "P(max)"
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
