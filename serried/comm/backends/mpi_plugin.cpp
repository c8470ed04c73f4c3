// The mpi backend is a plug-in, since not every machine has an MPI: this opens it.
#include "serried/comm/backends/mpi_plugin.h"

#include "serried/base/error.h"
#include "serried/base/plugin.h"
#include "serried/comm/backends/factories.h"

namespace serried {
namespace {

const detail::FoundPlugin& found_plugin() {
  static const detail::FoundPlugin found = detail::find_plugin("mpi", kMpiPluginSymbol);
  return found;
}

const MpiPlugin& opened_plugin() {
  return reinterpret_cast<MpiPluginFunction>(found_plugin().function)();
}

}  // namespace

std::string why_mpi_unavailable() {
  if (!found_plugin().why_not.empty()) {
    return found_plugin().why_not + ": build serried where Open MPI is installed, or set SERRIED_PLUGIN_PATH";
  }
  return opened_plugin().why_unavailable();
}

Group make_mpi_group(const FactoryArgs& args) {
  const std::string why = why_mpi_unavailable();
  if (why.empty()) return opened_plugin().make_group(args);
  raise<c10::NotImplementedError>(
      {"new_group", "\"mpi\" does not work here: " + why, "use \"auto\", \"shm\" or \"gloo\""});
}

}  // namespace serried
