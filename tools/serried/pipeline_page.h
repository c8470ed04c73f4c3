// A pipeline's picture as a page, with its numbers and its table.
#pragma once

#include <string>

#include "serried/parallel/pipeline/trace.h"

namespace serried::tools {

/// One HTML file that needs nothing else. To point at an action shows the way of its micro-batch.
std::string pipeline_page(const PipelineTable& table, const PipelineSimulation& simulation, const std::string& title);

/// The same of a step as it ran, with its simulation below and how late every action was.
std::string pipeline_page(const PipelineTrace& trace, const std::string& title);

}  // namespace serried::tools
