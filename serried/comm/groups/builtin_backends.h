// The backends that come with the library.
#pragma once

#include "serried/comm/groups/group.h"

#include <span>
#include <string>

namespace serried::detail {

struct BuiltinBackend {
  const char* name;
  Group (*factory)(const FactoryArgs&);
  std::string (*why_unavailable)();  // empty text: it works here
};

/// All of them, sorted by name; a new backend is one folder and one line here.
std::span<const BuiltinBackend> builtin_backends();

}  // namespace serried::detail
