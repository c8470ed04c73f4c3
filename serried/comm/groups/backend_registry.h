// The backends that new_group knows by name.
#pragma once

#include "serried/comm/groups/group.h"

#include <string>

namespace serried::detail {

/// The factory of `name`; ValueError that lists the known names. `where` is the call that asked.
BackendFactory find_backend(std::string_view where, const std::string& name);

}  // namespace serried::detail
