// A pipeline's table as a picture: time goes to the right, a row per rank.
#pragma once

#include <string>

#include "serried/parallel/pipeline/simulate.h"

namespace serried::tools {

/// An SVG file by itself: colours per kind of action, hatched where a rank waits, light or dark as the reader's screen.
/// Each action says what it is when it is pointed at. `title` stands above.
/// Pictures that are to be compared are drawn to the scale of one of them, `scale_of`.
std::string pipeline_svg(const PipelineTable& table, const PipelineSimulation& simulation, const std::string& title,
                         const PipelineSimulation* scale_of = nullptr);

}  // namespace serried::tools
