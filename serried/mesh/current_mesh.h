// This thread's current mesh, for those who put back what held at another time.
#pragma once

#include <optional>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// Makes `mesh`, or none, current, without an end; gives what was.
std::optional<DeviceMesh> exchange_current_mesh(std::optional<DeviceMesh> mesh);

}  // namespace serried::detail
