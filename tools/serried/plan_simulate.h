// `serried plan --simulate`: how long a training step takes on machines that are not there.
#pragma once

namespace serried::tools {

/// Whether the words ask for it.
bool asks_for_simulation(int argc, char** argv);

/// Parses them, and prints what they ask for. The code to exit with.
int plan_simulation(int argc, char** argv);

}  // namespace serried::tools
