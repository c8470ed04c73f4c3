// The SVG format: a grid to scale, one colour per set of ranks.
#include <algorithm>
#include <map>
#include <sstream>

#include "serried/base/text.h"
#include "serried/tensor/pictures/sharding_picture.h"

namespace serried::detail {
namespace {

constexpr double kLeft = 84, kTop = 64, kWidth = 640, kHeight = 360;
constexpr double kLetter = 7.2;  // width of one in the label's font

// Where each interval begins in the picture, and where the last one ends: to scale, but wide enough to read.
std::vector<double> edges(const std::vector<Span>& spans, double length, double least) {
  int64_t total = 0;
  for (const Span& span : spans) total += span.size;
  std::vector<double> at{0};
  for (const Span& span : spans) {
    const double share = total == 0 ? length : length * double(span.size) / double(total);
    at.push_back(at.back() + std::max(share, least));
  }
  return at;
}

// Neighbouring hues far apart, by the golden angle.
std::string colour(size_t index) {
  const int hue = int((double(index) * 137.508) + 210) % 360;
  return "hsl(" + std::to_string(hue) + ",62%,78%)";
}

class Drawing {
 public:
  explicit Drawing(const ShardingPicture& picture) : picture_(picture) {
    size_t longest = 0;
    for (const auto& row : picture.cells) {
      for (const SharedCell& cell : row) longest = std::max(longest, ranks_text(cell.ranks).size());
    }
    const double least = std::min(120.0, double(longest) * kLetter + 12);
    x_ = edges(picture.columns, kWidth, least);
    y_ = edges(picture.rows, picture.row_dim < 0 ? 72 : kHeight, 26);
  }

  std::string draw() {
    const double width = std::max(kLeft + x_.back() + 20, double(picture_.title.size()) * 8.5 + 24);
    const double height = kTop + y_.back() + 24 + 20 * double(picture_.notes.size());
    out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << " " << height << "\" width=\""
         << width << "\" height=\"" << height << "\" font-family=\"ui-monospace,Menlo,Consolas,monospace\" "
         << "font-size=\"12\">\n";
    out_ << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    text(12, 22, "start", picture_.title, " font-size=\"14\" font-weight=\"bold\"");
    axes();
    for (size_t row = 0; row < picture_.rows.size(); ++row) {
      for (size_t column = 0; column < picture_.columns.size(); ++column) cell(row, column);
    }
    double y = kTop + y_.back() + 22;
    for (const std::string& note : picture_.notes) {
      text(12, y, "start", note, " fill=\"#555\"");
      y += 20;
    }
    out_ << "</svg>\n";
    return out_.str();
  }

 private:
  void text(double x, double y, const char* anchor, const std::string& words, const char* style = "") {
    out_ << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"" << anchor << "\"" << style << ">"
         << escaped(words) << "</text>\n";
  }

  void axes() {
    if (picture_.column_dim >= 0) {
      text(kLeft - 8, kTop - 8, "end", "dim " + std::to_string(picture_.column_dim), " fill=\"#555\"");
      for (size_t i = 0; i < picture_.columns.size(); ++i) {
        text(kLeft + (x_[i] + x_[i + 1]) / 2, kTop - 8, "middle", span_text(picture_.columns[i]), " fill=\"#555\"");
      }
    }
    if (picture_.row_dim < 0) return;
    text(12, kTop + 16, "start", "dim " + std::to_string(picture_.row_dim), " fill=\"#555\"");
    for (size_t i = 0; i < picture_.rows.size(); ++i) {
      const double middle = kTop + (y_[i] + y_[i + 1]) / 2 + 4;
      // The first row's label must not lie on the axis' own.
      text(kLeft - 8, i == 0 ? std::max(middle, kTop + 32) : middle, "end", span_text(picture_.rows[i]),
           " fill=\"#555\"");
    }
  }

  void cell(size_t row, size_t column) {
    const std::vector<int64_t>& ranks = picture_.cells[row][column].ranks;
    const size_t index = colours_.emplace(ranks, colours_.size()).first->second;
    const std::string label = ranks_text(ranks);
    const double width = x_[column + 1] - x_[column], height = y_[row + 1] - y_[row];
    out_ << "<g class=\"cell\" data-ranks=\"";
    for (size_t i = 0; i < ranks.size(); ++i) out_ << (i > 0 ? " " : "") << ranks[i];
    out_ << "\"><title>" << label << ": " << escaped(where(row, column)) << "</title>";
    out_ << "<rect x=\"" << kLeft + x_[column] << "\" y=\"" << kTop + y_[row] << "\" width=\"" << width
         << "\" height=\"" << height << "\" fill=\"" << (ranks.empty() ? "#eee" : colour(index))
         << "\" stroke=\"#444\"/>";
    std::string shown = label;
    const size_t room = size_t(std::max(0.0, (width - 6) / kLetter));
    if (shown.size() > room) shown = room > 3 ? shown.substr(0, room - 2) + ".." : "";
    text(kLeft + x_[column] + width / 2, kTop + y_[row] + height / 2 + 4, "middle", shown);
    out_ << "</g>\n";
  }

  std::string where(size_t row, size_t column) const {
    std::string words;
    if (picture_.row_dim >= 0) words += "dim " + std::to_string(picture_.row_dim) + " " + span_text(picture_.rows[row]);
    if (picture_.column_dim < 0) return "the whole";
    return words + (words.empty() ? "" : ", ") + "dim " + std::to_string(picture_.column_dim) + " " +
           span_text(picture_.columns[column]);
  }

  const ShardingPicture& picture_;
  std::vector<double> x_, y_;
  std::map<std::vector<int64_t>, size_t> colours_;
  std::ostringstream out_;
};

}  // namespace

std::string draw_svg(const ShardingPicture& picture) {
  return Drawing(picture).draw();
}

}  // namespace serried::detail
