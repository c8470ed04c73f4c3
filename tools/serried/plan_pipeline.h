// `serried plan --pipeline`: the timetable of a pipeline schedule, printed and drawn.
#pragma once

namespace serried::tools {

/// Whether these are words for plan_pipeline: --pipeline is among them.
bool asks_for_pipeline(int argc, char** argv);

/// The command; its exit code.
int plan_pipeline(int argc, char** argv);

}  // namespace serried::tools
