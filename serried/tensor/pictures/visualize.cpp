// visualize_sharding, and its text format.
#include "serried/tensor/pictures/visualize.h"

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/pictures/sharding_picture.h"

namespace serried {

namespace detail {
namespace {

using Table = std::vector<std::vector<std::string>>;

Table make_table(const ShardingPicture& picture) {
  Table table;
  if (picture.column_dim >= 0) {
    table.emplace_back();
    if (picture.row_dim >= 0) table.back().push_back(c10::str("dim ", picture.row_dim, " \\ ", picture.column_dim));
    for (const Span& column : picture.columns) table.back().push_back(span_text(column));
  }
  for (size_t row = 0; row < picture.rows.size(); ++row) {
    table.emplace_back();
    if (picture.row_dim >= 0) table.back().push_back(span_text(picture.rows[row]));
    for (const SharedCell& cell : picture.cells[row]) table.back().push_back(ranks_text(cell.ranks));
  }
  return table;
}

std::string line_of(const std::vector<size_t>& widths) {
  std::string line = "+";
  for (size_t width : widths) line += std::string(width + 2, '-') + "+";
  return line + "\n";
}

}  // namespace

std::string draw_text(const ShardingPicture& picture) {
  const Table table = make_table(picture);
  std::vector<size_t> widths(table[0].size(), 0);
  for (const auto& row : table) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text = picture.title + "\n" + line_of(widths);
  for (const auto& row : table) {
    text += "|";
    for (size_t i = 0; i < row.size(); ++i) {
      text += c10::str(" ", row[i], std::string(widths[i] - row[i].size(), ' '), " |");
    }
    text.append("\n").append(line_of(widths));
  }
  for (const std::string& note : picture.notes) text += note + "\n";
  return text;
}

}  // namespace detail

std::string visualize_sharding(const at::Tensor& d, const VisualizeOptions& options) {
  const DTensorMeta* meta = d.defined() ? dtensor_meta(d) : nullptr;
  if (meta != nullptr) return visualize_sharding(*meta->spec, options);
  raise<c10::TypeError>({"visualize_sharding",
                         (d.defined() ? watch::describe_tensor(d) : "an undefined tensor") + " is not a DTensor",
                         "pass a DTensor; distribute_tensor makes one"});
}

std::string visualize_sharding(const Spec& spec, const VisualizeOptions& options) {
  if (options.format == "text") return detail::draw_text(detail::make_picture(spec, options.dims));
  if (options.format == "svg") return detail::draw_svg(detail::make_picture(spec, options.dims));
  if (options.format == "html") return detail::draw_html(detail::make_picture(spec, options.dims));
  raise<c10::ValueError>({"visualize_sharding", "there is no format \"" + options.format + "\"; known: text, svg, html",
                          "pass one of the known formats"});
}

}  // namespace serried
