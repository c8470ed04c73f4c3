// The HTML format: the SVG, and a table of ranks that lights up their cells.
#include <sstream>

#include "serried/base/text.h"
#include "serried/tensor/pictures/sharding_picture.h"
#include "serried/tensor/spec.h"

namespace serried::detail {
namespace {

constexpr const char* kStyle = R"(
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
table { border-collapse: collapse; margin-top: 16px; }
th, td { text-align: left; padding: 3px 14px; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
tbody tr:hover, tbody tr.on { background: #fff3c4; }
tr.empty td { color: #888; }
.cell.dim { opacity: 0.25; }
figure { margin: 0; overflow-x: auto; }
)";

constexpr const char* kScript = R"(
const rows = [...document.querySelectorAll('tbody tr')], cells = [...document.querySelectorAll('.cell')];
const show = ranks => {
  for (const cell of cells) {
    const held = cell.dataset.ranks.split(' ');
    cell.classList.toggle('dim', ranks.length > 0 && !ranks.some(r => held.includes(r)));
  }
  for (const row of rows) row.classList.toggle('on', ranks.includes(row.dataset.rank));
};
for (const row of rows) {
  row.addEventListener('mouseenter', () => show([row.dataset.rank]));
  row.addEventListener('mouseleave', () => show([]));
}
for (const cell of cells) {
  cell.addEventListener('mouseenter', () => show(cell.dataset.ranks.split(' ').filter(r => r)));
  cell.addEventListener('mouseleave', () => show([]));
}
)";

void write_row(std::ostream& out, const RankPart& part) {
  out << "<tr data-rank=\"" << part.rank << "\"" << (part.is_empty ? " class=\"empty\"" : "") << "><td>" << part.rank
      << "</td><td>" << sizes_text(part.coordinate) << "</td><td>" << sizes_text(part.offsets) << "</td><td>"
      << sizes_text(part.sizes) << (part.is_empty ? " (empty)" : "") << "</td></tr>\n";
}

}  // namespace

std::string draw_html(const ShardingPicture& picture) {
  std::ostringstream out;
  out << "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>" << escaped(picture.title)
      << "</title>\n<style>" << kStyle << "</style>\n</head>\n<body>\n<figure>\n"
      << draw_svg(picture)
      << "</figure>\n<table>\n<thead><tr><th>rank</th><th>coordinate</th><th>first index</th><th>local "
         "shape</th></tr></thead>\n"
      << "<tbody>\n";
  for (const RankPart& part : picture.parts) write_row(out, part);
  out << "</tbody>\n</table>\n<script>" << kScript << "</script>\n</body>\n</html>\n";
  return out.str();
}

}  // namespace serried::detail
