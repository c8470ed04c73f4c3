// Columns of equal width, cut into blocks.
#include "tools/serried/pipeline_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace serried::tools {
namespace {

using Lines = std::vector<std::vector<std::string>>;  // cells per rank and unit of time

bool is_whole(const PipelineSimulation& simulation) {
  for (const auto& row : simulation.spans) {
    for (const PipelineSimulation::Span& span : row) {
      if (span.begin != std::floor(span.begin) || span.end != std::floor(span.end)) return false;
    }
  }
  return true;
}

Lines cells_of(const PipelineTable& table, const PipelineSimulation& simulation) {
  Lines cells(table.rows().size(), std::vector<std::string>(size_t(simulation.makespan), "."));
  for (size_t rank = 0; rank < cells.size(); ++rank) {
    for (size_t i = 0; i < table.rows()[rank].size(); ++i) {
      const PipelineSimulation::Span span = simulation.spans[rank][i];
      for (double time = span.begin; time < span.end; ++time) cells[rank][size_t(time)][0] = '-';
      if (span.begin < span.end) cells[rank][size_t(span.begin)] = to_cell(table.rows()[rank][i]);
    }
  }
  return cells;
}

std::string right(const std::string& text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}

std::string left(const std::string& text, size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

std::string one_line(const std::string& label, size_t label_width, const std::vector<std::string>& cells,
                     size_t width) {
  std::string line = left(label, label_width);
  for (const std::string& cell : cells) line += right(cell, width + 2);
  return line + "\n";
}

}  // namespace

std::string short_number(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", number);
  return text;
}

std::string percent(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * part);
  return text;
}

double busy_time(const PipelineSimulation& simulation, size_t rank) {
  double busy = 0;
  for (const PipelineSimulation::Span& span : simulation.spans[rank]) busy += span.end - span.begin;
  return busy;
}

std::string timetable(const PipelineTable& table, const PipelineSimulation& simulation, size_t width,
                      size_t most_blocks) {
  if (!is_whole(simulation)) return table.to_text();
  const Lines cells = cells_of(table, simulation);
  const size_t num_units = size_t(simulation.makespan);
  size_t cell_width = std::to_string(num_units).size();
  for (const auto& row : cells) {
    for (const std::string& cell : row) cell_width = std::max(cell_width, cell.size());
  }
  const size_t label_width = std::string("rank ").size() + std::to_string(cells.size() - 1).size();
  const size_t per_block = std::max<size_t>(1, (std::max(width, label_width) - label_width) / (cell_width + 2));
  std::string text;
  const size_t num_shown = num_units / per_block < most_blocks ? num_units : most_blocks * per_block;
  for (size_t begin = 0; begin < num_shown; begin += per_block) {
    const size_t end = std::min(begin + per_block, num_units);
    std::vector<std::string> times;
    for (size_t time = begin; time < end; ++time) times.push_back(std::to_string(time));
    if (begin > 0) text += '\n';
    text += one_line("time", label_width, times, cell_width);
    for (size_t rank = 0; rank < cells.size(); ++rank) {
      const std::vector<std::string> part(cells[rank].begin() + ptrdiff_t(begin), cells[rank].begin() + ptrdiff_t(end));
      text += one_line("rank " + std::to_string(rank), label_width, part, cell_width);
    }
  }
  if (num_shown < num_units) text += "... and up to time " + std::to_string(num_units - 1) + ": --full\n";
  return text;
}

std::string aligned(const TextTable& lines) {
  std::vector<size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) text += right(line[i], widths[i] + (i == 0 ? 0 : 2));
    text += "\n";
  }
  return text;
}

std::string rank_list(const PipelineTable& table, const PipelineSimulation& simulation) {
  TextTable lines = {{"rank", "stages", "works", "waits", "most in flight"}};
  for (size_t rank = 0; rank < table.rows().size(); ++rank) {
    std::string stages;
    for (int64_t stage : table.stages_of(int64_t(rank))) {
      if (!stages.empty()) stages += ' ';
      stages += std::to_string(stage);
    }
    const double busy = busy_time(simulation, rank);
    lines.push_back({std::to_string(rank), stages, short_number(busy), short_number(simulation.makespan - busy),
                     std::to_string(simulation.peak_in_flight[rank])});
  }
  return aligned(lines);
}

}  // namespace serried::tools
