// What launchers see, as JSON: on the wire between launchers, and in dumps. Both may come from anywhere.
#pragma once

#include <stdexcept>
#include <string>

#include "serried/launch/seen.h"

namespace serried::launch {

/// `spaced`: over lines, for people.
std::string to_json(const HostSeen& seen, bool spaced = false);

/// std::runtime_error that says what is wrong if it is none.
HostSeen host_seen_from(const std::string& json);

}  // namespace serried::launch
