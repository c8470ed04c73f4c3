// A plug-in that was built with another version.
#include "serried/base/plugin.h"

extern "C" const serried::detail::PluginSymbol serried_mpi_plugin{"serried 0.0.1, LibTorch 1.0", nullptr};
