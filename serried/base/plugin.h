// Parts of the library that need what not every machine has: shared libraries of their own, opened where they are used.
#pragma once

#include <string>
#include <string_view>

namespace serried::detail {

/// The one symbol of a plug-in: what it was built with, kPluginAbi of base/plugin_abi.h, and a function, whose type
/// goes with the symbol's name.
///     extern "C" const serried::detail::PluginSymbol serried_ucx_plugin{kPluginAbi, reinterpret_cast<void*>(&make)};
struct PluginSymbol {
  const char* abi = nullptr;
  void* function = nullptr;
};

struct FoundPlugin {
  void* function = nullptr;
  std::string path = {};     // of the library
  std::string why_not = {};  // in one line, where there is no function
};

/// Opens libserried_<name>.so in the first folder of SERRIED_PLUGIN_PATH (with colons between) that has it, else beside
/// libserried.so, and reads `symbol`. Nothing of a plug-in that was built with other versions runs but the initialisers
/// of its libraries. It stays open.
FoundPlugin find_plugin(std::string_view name, const char* symbol);

}  // namespace serried::detail
