// A pipeline's table and what it costs, for a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serried/parallel/pipeline/simulate.h"

namespace serried::tools {

/// "0.059", "99", "1.5e+06"
std::string short_number(double number);

/// "3.0 %"
std::string percent(double part);

/// How long a rank computes.
double busy_time(const PipelineSimulation& simulation, size_t rank);

/// A column per unit of time and a row per rank, in blocks of at most `width` letters. Where an action takes more than
/// one unit, "-" stands in the rest of them, and "." where a rank waits. Actions that take no time are left out. Times
/// that are no whole numbers fit into no columns: then the table alone. More than `most_blocks` are counted.
///     time      0    1    2
///     rank 0  0F0  0F1    .
std::string timetable(const PipelineTable& table, const PipelineSimulation& simulation, size_t width = 100,
                      size_t most_blocks = SIZE_MAX);

/// Lines of cells, the first one of headings.
using TextTable = std::vector<std::vector<std::string>>;

/// Columns as wide as their widest cell, all words to the right.
std::string aligned(const TextTable& lines);

/// Per rank: its stages, how long it works and waits, and its most micro-batches in flight.
std::string rank_list(const PipelineTable& table, const PipelineSimulation& simulation);

}  // namespace serried::tools
