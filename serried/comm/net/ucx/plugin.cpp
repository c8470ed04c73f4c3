// What libserried_ucx.so gives to the library.
#include "serried/base/plugin.h"
#include "serried/base/plugin_abi.h"
#include "serried/comm/net/make_wire.h"
#include "serried/comm/net/ucx/wire.h"

namespace serried::net {
namespace {

std::unique_ptr<Wire> make(const std::string& address, int rank) {
  return std::make_unique<UcxWire>(ucx_context(address), rank, address);
}

static_assert(std::is_same_v<decltype(&make), WireFactory>);

}  // namespace
}  // namespace serried::net

extern "C" const serried::detail::PluginSymbol serried_ucx_plugin{serried::detail::kPluginAbi,
                                                                  reinterpret_cast<void*>(&serried::net::make)};
