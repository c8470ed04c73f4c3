// Cuts the drawn dims at every edge of every rank's part, and lists who holds each cell.
#include "serried/tensor/pictures/sharding_picture.h"

#include <algorithm>
#include <set>

#include "serried/base/error.h"
#include "serried/tensor/spec.h"

namespace serried::detail {
namespace {

constexpr const char* kWhere = "visualize_sharding";

std::vector<int64_t> cut_dims(const Spec& spec) {
  std::set<int64_t> dims;
  for (const Placement& placement : spec.placements) {
    if (placement.is_shard()) dims.insert(placement.dim());
  }
  return {dims.begin(), dims.end()};
}

std::vector<int64_t> given_dims(const Spec& spec, std::vector<int64_t> dims) {
  const int64_t ndim = int64_t(spec.sizes.size());
  for (int64_t& dim : dims) {
    const int64_t resolved = dim < 0 ? dim + ndim : dim;
    if (resolved < 0 || resolved >= ndim) {
      raise<c10::IndexError>({kWhere, c10::str("dim ", dim, " is not one of ", spec.to_string()),
                              c10::str("pass dims from 0 to ", ndim - 1)});
    }
    dim = resolved;
  }
  if (dims.size() <= 2 && (dims.size() < 2 || dims[0] != dims[1])) return dims;
  raise<c10::ValueError>({kWhere, c10::str("cannot draw the dims ", sizes_text(dims), " in a plane"),
                          "pass one dim or two different ones as {.dims}"});
}

// The cut dims, and as many whole ones in front as make two.
std::vector<int64_t> chosen_dims(const Spec& spec) {
  std::vector<int64_t> dims = cut_dims(spec);
  if (dims.size() > 2) {
    raise<c10::ValueError>({kWhere,
                            c10::str(spec.to_string(), " is cut along ", dims.size(), " dims, and a picture has two"),
                            c10::str("draw two of them: {.dims = {", dims[0], ", ", dims[1], "}}")});
  }
  for (int64_t dim = 0; dim < int64_t(spec.sizes.size()) && dims.size() < 2; ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) dims.push_back(dim);
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

class Maker {
 public:
  explicit Maker(const Spec& spec) : spec_(spec) { picture_.title = spec.to_string(); }

  ShardingPicture make(const std::vector<int64_t>& dims) {
    if (dims.size() == 2) picture_.row_dim = dims[0];
    if (!dims.empty()) picture_.column_dim = dims.back();
    find_parts();
    picture_.rows = intervals(picture_.row_dim);
    picture_.columns = intervals(picture_.column_dim);
    for (const Span& row : picture_.rows) {
      picture_.cells.emplace_back();
      for (const Span& column : picture_.columns) picture_.cells.back().push_back({holders(row, column)});
    }
    add_notes();
    return std::move(picture_);
  }

 private:
  Position at(const RankPart& part) const { return {spec_.mesh.shape(), part.coordinate}; }

  void find_parts() {
    for (size_t i = 0; i < spec_.mesh.rank_list().size(); ++i) {
      RankPart part{spec_.mesh.rank_list()[i], coordinate_of(int64_t(i), spec_.mesh.shape()), {}, {}, false};
      part.sizes = local_sizes(spec_.sizes, spec_.placements, at(part));
      part.offsets = local_offsets(spec_.sizes, spec_.placements, at(part));
      part.is_empty = std::find(part.sizes.begin(), part.sizes.end(), 0) != part.sizes.end();
      picture_.parts.push_back(std::move(part));
    }
  }

  std::vector<Span> spans(const RankPart& part, int64_t dim) const {
    return owned_spans(spec_.sizes[dim], dim, spec_.placements, at(part));
  }

  std::vector<Span> intervals(int64_t dim) const {
    if (dim < 0) return {{0, 1}};
    std::set<int64_t> edges{0, spec_.sizes[dim]};
    for (const RankPart& part : picture_.parts) {
      for (const Span& span : spans(part, dim)) {
        edges.insert(span.begin);
        edges.insert(span.end());
      }
    }
    std::vector<Span> result;
    for (auto edge = edges.begin(); std::next(edge) != edges.end(); ++edge) {
      result.push_back({*edge, *std::next(edge) - *edge});
    }
    return result.empty() ? std::vector<Span>{{0, 0}} : result;
  }

  bool holds(const RankPart& part, int64_t dim, int64_t index) const {
    const std::vector<Span> owned = spans(part, dim);
    return std::any_of(owned.begin(), owned.end(), [&](const Span& s) { return s.begin <= index && index < s.end(); });
  }

  std::vector<int64_t> holders(const Span& row, const Span& column) const {
    std::vector<int64_t> ranks;
    for (const RankPart& part : picture_.parts) {
      if (part.is_empty) continue;
      bool here = true;
      for (int64_t dim = 0; here && dim < int64_t(spec_.sizes.size()); ++dim) {
        const int64_t index = dim == picture_.row_dim ? row.begin : dim == picture_.column_dim ? column.begin : 0;
        here = holds(part, dim, index);
      }
      if (here) ranks.push_back(part.rank);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  void add_notes() {
    std::vector<int64_t> empty;
    for (const RankPart& part : picture_.parts) {
      if (part.is_empty) empty.push_back(part.rank);
    }
    std::sort(empty.begin(), empty.end());
    if (!empty.empty()) picture_.notes.push_back("holds nothing: " + ranks_text(empty));
    for (size_t axis = 0; axis < spec_.placements.size(); ++axis) {
      if (!spec_.placements[axis].is_partial()) continue;
      picture_.notes.push_back(c10::str("values along axis ", axis, " of the mesh are pending a ",
                                        to_string(spec_.placements[axis].reduce()), " over its ranks"));
    }
    for (int64_t dim : cut_dims(spec_)) {
      if (dim == picture_.row_dim || dim == picture_.column_dim) continue;
      picture_.notes.push_back(c10::str("dim ", dim, " is cut too: drawn at its index 0"));
    }
  }

  const Spec& spec_;
  ShardingPicture picture_;
};

}  // namespace

ShardingPicture make_picture(const Spec& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> drawn = dims.empty() ? chosen_dims(spec) : given_dims(spec, dims);
  std::sort(drawn.begin(), drawn.end());
  return Maker(spec).make(drawn);
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  if (ranks.empty()) return "nobody";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ",";
    text += std::to_string(ranks[i]);
    // Two neighbours read better apart.
    if (last > i) text += (last == i + 1 ? "," : "-");
    if (last > i) text += std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string span_text(const Span& span) {
  if (span.size == 0) return "none";
  return span.size == 1 ? std::to_string(span.begin) : c10::str(span.begin, "-", span.end() - 1);
}

}  // namespace serried::detail
