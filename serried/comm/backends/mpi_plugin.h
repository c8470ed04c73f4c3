// What libserried_mpi.so gives to the library.
#pragma once

#include "serried/comm/groups/group.h"

#include <string>

namespace serried {

/// `serried_mpi_plugin` is a detail::PluginSymbol whose function is an MpiPluginFunction.
struct MpiPlugin {
  Group (*make_group)(const FactoryArgs& args);
  std::string (*why_unavailable)();  // in this process; empty where it works
};
using MpiPluginFunction = const MpiPlugin& (*)();

inline constexpr const char* kMpiPluginSymbol = "serried_mpi_plugin";

}  // namespace serried
