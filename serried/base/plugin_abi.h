// The versions that a plug-in and the library have to share. For the sources of plug-ins; CMake defines
// SERRIED_VERSION.
#pragma once

#include <torch/version.h>

namespace serried::detail {

inline constexpr char kPluginAbi[] = "serried " SERRIED_VERSION ", LibTorch " TORCH_VERSION;

}  // namespace serried::detail
