// A grid of who holds what, from which all formats are drawn.
#pragma once

#include <string>
#include <vector>

#include "serried/tensor/spec.h"

namespace serried::detail {

struct RankPart {
  int64_t rank;  // in the root's group
  c10::DimVector coordinate;
  c10::DimVector offsets;
  c10::DimVector sizes;
  bool is_empty;
};

struct SharedCell {
  std::vector<int64_t> ranks;  // ascending; several hold copies, or summands where a placement is partial
  bool operator==(const SharedCell&) const = default;
};

struct ShardingPicture {
  std::string title;               // "f32[8,4] S0 R on mesh dp=2 tp=2"
  std::vector<std::string> notes;  // what the grid does not show
  int64_t row_dim = -1;            // -1: one row
  int64_t column_dim = -1;
  std::vector<Span> rows;
  std::vector<Span> columns;
  std::vector<std::vector<SharedCell>> cells;  // [row][column]
  std::vector<RankPart> parts;                 // of all ranks of the mesh
};

ShardingPicture make_picture(const Spec& spec, const std::vector<int64_t>& dims);

/// "rank 3", "ranks 0-2,5"; "nobody" for none.
std::string ranks_text(const std::vector<int64_t>& ranks);
/// "3", "0-4" (inclusive), "none"
std::string span_text(const Span& span);

std::string draw_text(const ShardingPicture& picture);
std::string draw_svg(const ShardingPicture& picture);
std::string draw_html(const ShardingPicture& picture);

}  // namespace serried::detail
