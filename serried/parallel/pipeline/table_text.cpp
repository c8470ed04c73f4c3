// Tables as CSV and as text, both ways.
#include <algorithm>
#include <optional>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/parallel/pipeline/table.h"

namespace serried {
namespace {

constexpr std::string_view kBlanks = " \t\r";

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// The pieces between separators, empty ones too; at least one.
std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> pieces;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find_first_of(separators, begin), text.size());
    pieces.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return pieces;
}

// As much of a cell as an error shows.
std::string shown(std::string_view cell) {
  constexpr size_t kMost = 40;
  const std::string text = detail::printable(cell.substr(0, kMost));
  return "\"" + text + (cell.size() > kMost ? "..." : "") + "\"";
}

[[noreturn]] void refuse_cell(std::string_view cell, size_t line) {
  const bool is_message = cell.find("SEND_") != cell.npos || cell.find("RECV_") != cell.npos;
  raise<c10::ValueError>({"PipelineTable", shown(cell) + " in line " + std::to_string(line) + " is no action",
                          is_message
                              ? "leave messages out: they follow from the actions"
                              : "write stage, F B I or W, micro-batch: 0F3; or 0UNSHARD, 0RESHARD, 0REDUCE_GRAD"});
}

PipelineTable::Row parse_row(std::string_view line, std::string_view separators, size_t number) {
  PipelineTable::Row row;
  for (std::string_view piece : split(line, separators)) {
    const std::string_view cell = trimmed(piece);
    if (cell.empty()) continue;
    const std::optional<PipelineAction> action = parse_cell(cell);
    if (!action) refuse_cell(cell, number);
    row.push_back(*action);
  }
  return row;
}

// Takes "rank 3:" off a line.
std::string_view without_rank(std::string_view line, size_t rank, size_t number) {
  const std::string head = "rank " + std::to_string(rank) + ":";
  line = trimmed(line);
  if (line.starts_with(head)) return line.substr(head.size());
  raise<c10::ValueError>({"PipelineTable",
                          "line " + std::to_string(number) + " begins with " + shown(line.substr(0, 12)),
                          "begin it with \"" + head + "\": ranks stand in order, one in a line"});
}

std::string joined(const PipelineTable::Row& row, char separator) {
  std::string text;
  for (const PipelineAction& action : row) {
    if (!text.empty()) text += separator;
    text += to_cell(action);
  }
  return text;
}

}  // namespace

PipelineTable PipelineTable::from_csv(std::string_view text) {
  std::vector<std::string_view> lines = split(text, "\n");
  if (trimmed(lines.back()).empty()) lines.pop_back();  // what follows the last line break
  std::vector<Row> rows;
  for (std::string_view line : lines) rows.push_back(parse_row(line, ",", rows.size() + 1));
  return PipelineTable(std::move(rows));
}

std::string PipelineTable::to_csv() const {
  std::string text;
  for (const Row& row : rows_) text += joined(row, ',') + "\n";
  return text;
}

PipelineTable PipelineTable::from_text(std::string_view text) {
  std::vector<Row> rows;
  size_t number = 0;
  for (std::string_view line : split(text, "\n")) {
    ++number;
    if (trimmed(line).empty()) continue;
    rows.push_back(parse_row(without_rank(line, rows.size(), number), kBlanks, number));
  }
  return PipelineTable(std::move(rows));
}

std::string PipelineTable::to_text() const {
  std::string text;
  for (size_t rank = 0; rank < rows_.size(); ++rank) {
    text += "rank " + std::to_string(rank) + ": " + joined(rows_[rank], ' ') + "\n";
  }
  return text;
}

}  // namespace serried
