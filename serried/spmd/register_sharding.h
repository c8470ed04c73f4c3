// A sharding rule for an op of yours.
#pragma once

#include <string>

namespace serried {

/// Gives an op of yours, or one of ATen's, a sharding rule; docs/rules.md has the notation. `op` is "ns::name" for all
/// overloads or "ns::name.overload" for one. ValueError for an op that does not exist and for a malformed rule. Holds
/// for the whole process: calls planned by another rule before are planned anew.
///     register_sharding("mylib::rope", "...d, !d, !d -> ...d");
void register_sharding(const std::string& op, const std::string& rule);

}  // namespace serried
